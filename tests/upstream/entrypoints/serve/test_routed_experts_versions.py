# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which weights the rows of an answer came from."""

import json

import numpy as np
import pytest

from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponse,
    CompletionResponseChoice,
)
from vllm.entrypoints.openai.engine.protocol import UsageInfo
from vllm.entrypoints.serve.routed_experts.answer import RoutedExpertsAnswer
from vllm.entrypoints.serve.routed_experts.protocol import RoutedExpertsMeta
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.weight_versions import ChoiceVersions, TokenVersions

META = RoutedExpertsMeta(
    num_layers=1,
    moe_layers=[0],
    num_experts=4,
    top_k=1,
    dtype="uint8",
    start=1,
    encoding="list",
    layout="full",
)


def result(number: int, num_prompt: int, *runs: tuple[int, str]) -> RequestOutput:
    """Of one prompt with three generated tokens."""
    versions = ChoiceVersions(None, 0)
    versions.add(TokenVersions(f"v{number}", number, list(runs)))
    rows = np.zeros((num_prompt + 1, 1, 1), np.uint8)
    output = CompletionOutput(
        *(0, "abc", [5, 6, 7], None, None, rows),
        finish_reason="length",
        routed_experts_versions=versions,
    )
    return RequestOutput("a", None, list(range(num_prompt)), None, [output], True)


def answer(*results: RequestOutput) -> dict:
    answer = RoutedExpertsAnswer(META, several_prompts=len(results) > 1)
    answer.take(*results)
    choices = [
        CompletionResponseChoice(index=index, text="abc")
        for index in range(len(results))
    ]
    filled = CompletionResponse(model="m", choices=choices, usage=UsageInfo())
    answer.fill(filled)
    return json.loads(filled.model_dump_json())


ONE = [(1, "a")]


@pytest.mark.parametrize(
    ("runs", "own"),
    [
        ([ONE, ONE], [None, None]),
        # The first choice ends before the change, or has it at another row.
        ([ONE, [(1, "a"), (7, "b")]], [None, [[1, "a"], [7, "b"]]]),
        ([[(1, "a"), (6, "b")], [(1, "b")]], [None, [[1, "b"]]]),
        ([[(1, "a"), (6, "b")], [(1, "a"), (6, "b")]], [None, None]),
    ],
)
def test_a_choice_has_runs_of_its_own_where_those_of_the_first_do_not_fit(runs, own):
    body = answer(result(1, 5, *runs[0]), result(2, 6, *runs[1]))
    assert body["weight_version"] == "v2"
    meta = body["routed_experts_meta"]
    assert meta["weight_versions"] == [list(run) for run in runs[0]]
    name = "routed_experts_weight_versions"
    assert [choice.get(name) for choice in body["choices"]] == own


def test_an_engine_that_tells_none_is_answered_without():
    without = result(1, 5)
    without.outputs[0].routed_experts_versions = None
    body = answer(without)
    assert "weight_version" not in body
    assert "weight_versions" not in body["routed_experts_meta"]
