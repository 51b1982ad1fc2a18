# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What rows a request gets, and how they come into its answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm.entrypoints.openai.server_utils import engine_error_handler
from vllm.entrypoints.serve.routed_experts.answer import (
    NO_ROUTED_EXPERTS,
    RoutedExpertsAnswer,
)
from vllm.entrypoints.serve.routed_experts.frontend import RoutedExpertsFrontend
from vllm.entrypoints.serve.routed_experts.protocol import (
    RoutedExpertsMeta,
    RoutedExpertsRequestFields,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.exceptions import EngineGenerateError

INFO = {
    "num_layers": 3,
    "moe_layers": [0, 2],
    "num_experts": 16,
    "top_k": 2,
    "dtype": "uint8",
}
META = RoutedExpertsMeta(**INFO, start=0, encoding="npy", layout="split")
FULL = META.model_copy(update={"layout": "full"})
PROMPT = [1, 2, 3, 4]


def make_rows(num_rows: int, first: int = 0) -> np.ndarray:
    ids = np.arange(first * 6, (first + num_rows) * 6) * 7 % 16
    return ids.reshape(-1, 3, 2).astype("uint8")


def output(index: int = 0, rows: Any = True, finish="length", tokens=(5, 6, 7)):
    rows = make_rows(len(tokens) - 1, first=9) if rows is True else rows
    return CompletionOutput(
        index, "ab", list(tokens), None, None, rows, finish_reason=finish
    )


def result(*outputs: CompletionOutput, prompt_rows: Any = True) -> RequestOutput:
    prompt_rows = make_rows(4) if prompt_rows is True else prompt_rows
    return RequestOutput(
        *("cmpl-1", None, PROMPT, None, list(outputs), True),
        prompt_routed_experts=prompt_rows,
    )


def response(num_choices: int = 1) -> SimpleNamespace:
    return SimpleNamespace(choices=[SimpleNamespace() for _ in range(num_choices)])


def fields(holder: SimpleNamespace) -> dict[str, Any]:
    """Fields set, rows as nested lists."""
    return {
        name: getattr(value, "rows", value)
        for name, value in vars(holder).items()
        if name != "choices"
    }


def same(found: dict[str, Any], **expected: Any) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], value)
        if isinstance(value, np.ndarray)
        else found[name] == value
        for name, value in expected.items()
    )


def test_rows_are_taken_out_of_the_results_and_put_into_the_response():
    answer, filled = RoutedExpertsAnswer(META), response(2)
    res = result(output(0), output(1, tokens=(5,)))
    answer.take(res)
    assert res.prompt_routed_experts is None
    assert [out.routed_experts for out in res.outputs] == [None, None]
    answer.fill(filled)
    top = fields(filled)
    assert same(top, routed_experts_meta=META, prompt_routed_experts=make_rows(4))
    assert same(fields(filled.choices[0]), routed_experts=make_rows(2, first=9))
    assert same(fields(filled.choices[1]), routed_experts=make_rows(0))


def test_choices_of_several_prompts_hold_their_prompt_rows():
    answer, filled = RoutedExpertsAnswer(META, several_prompts=True), response(2)
    answer.take(result(output()), result(output(), prompt_rows=make_rows(4, first=2)))
    answer.fill(filled)
    assert same(fields(filled), routed_experts_meta=META)
    prompts = [choice.prompt_routed_experts.rows for choice in filled.choices]
    np.testing.assert_array_equal(prompts, [make_rows(4), make_rows(4, first=2)])


def test_layout_full_has_no_prompt_rows():
    answer, filled = RoutedExpertsAnswer(FULL), response()
    answer.take(result(output(rows=make_rows(6)), prompt_rows=None))
    answer.fill(filled)
    assert same(fields(filled), routed_experts_meta=FULL)
    assert same(fields(filled.choices[0]), routed_experts=make_rows(6))


def put(answer: RoutedExpertsAnswer, out: CompletionOutput, num_generated: int):
    chunk = response()
    answer.events(chunk, result(out), out, num_generated)
    return fields(chunk), fields(chunk.choices[0])


def test_prompt_rows_come_once_on_the_first_chunk_that_ends_a_choice():
    answer, sent = RoutedExpertsAnswer(META), []
    for index, finish in ((0, None), (1, "stop"), (0, None), (0, "length")):
        top, choice = put(answer, output(index, finish=finish), 3)
        assert ("routed_experts" in choice) == (finish is not None)
        sent.append(sorted(top))
    both = ["prompt_routed_experts", "routed_experts_meta"]
    assert sent == [[], both, [], ["routed_experts_meta"]]


@pytest.mark.parametrize("rows", [None, make_rows(0), make_rows(2)])
def test_choice_without_a_token_has_no_fields(rows: Any):
    out = output(rows=rows, finish="abort", tokens=())
    assert put(RoutedExpertsAnswer(META), out, 0) == ({}, {})


def test_request_without_rows_leaves_results_and_responses_alone():
    res, filled = result(output()), response()
    NO_ROUTED_EXPERTS.take(res)
    NO_ROUTED_EXPERTS.fill(filled)
    assert res.prompt_routed_experts is not None and fields(filled) == {}
    assert put(NO_ROUTED_EXPERTS, output(), 3) == ({}, {})


WRONG = [
    ("generated", True, None, "(2, 3, 2)", "none"),
    ("generated", True, make_rows(1), "(2, 3, 2)", "(1, 3, 2) uint8"),
    ("generated", True, make_rows(3), "(2, 3, 2)", "(3, 3, 2) uint8"),
    ("generated", True, make_rows(2).astype("int16"), "(2, 3, 2)", "(2, 3, 2) int16"),
    ("prompt", None, True, "(4, 3, 2)", "none"),
    ("prompt", make_rows(3), True, "(4, 3, 2)", "(3, 3, 2) uint8"),
    ("all", None, make_rows(2), "(6, 3, 2)", "(2, 3, 2) uint8"),
]


@pytest.mark.parametrize(("name", "prompt_rows", "rows", "expected", "got"), WRONG)
def test_rows_that_do_not_fit_the_tokens_are_an_error(
    name: str, prompt_rows: Any, rows: Any, expected: str, got: str
):
    answer = RoutedExpertsAnswer(FULL if name == "all" else META)
    with pytest.raises(EngineGenerateError) as error:
        answer.take(result(output(rows=rows), prompt_rows=prompt_rows))
    assert str(error.value) == (
        f"request cmpl-1, choice 0: expected {name} rows {expected} uint8 for "
        f"4 prompt + 3 generated tokens from start 0, got {got}"
    )


def test_text_of_the_error_reaches_the_client():
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.server = None
    app.state.engine_client = SimpleNamespace(errored=False, is_running=True)
    app.exception_handler(EngineGenerateError)(engine_error_handler)

    @app.get("/")
    async def fail():
        RoutedExpertsAnswer(META).take(result(output(rows=None)))

    answer = TestClient(app).get("/")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].endswith("from start 0, got none")


class Engine:
    """An engine whose workers all answer INFO."""

    def __init__(self, **model_config: object) -> None:
        self.calls: list[str] = []
        self.model_config = SimpleNamespace(is_encoder_decoder=False, **model_config)

    async def collective_rpc(self, method: str) -> list[dict]:
        self.calls.append(method)
        return [INFO, INFO]


def settle(frontend: RoutedExpertsFrontend, params: Any, **ours: Any):
    """The request's answer, or the message of its refusal."""
    request = RoutedExpertsRequestFields(**ours)
    prompt = {"type": "token", "prompt_token_ids": PROMPT}
    error = asyncio.run(frontend.settle(request, params, prompt))
    if error is not None:
        assert error.error.code == 400
        return error.error.message
    return request.routed_experts_answer


def make_frontend() -> RoutedExpertsFrontend:
    on = {"enable_return_routed_experts": True}
    forms = {"routed_experts_encoding": "npy", "routed_experts_layout": "split"}
    return RoutedExpertsFrontend(Engine(**on, **forms))


def test_engine_is_asked_once_and_by_the_first_request_that_wants_rows():
    frontend = make_frontend()
    params = SamplingParams()
    unwanted = settle(frontend, params, return_routed_experts=False)
    assert unwanted is NO_ROUTED_EXPERTS and params.return_routed_experts is False
    assert frontend.engine_client.calls == []
    ours = {"routed_experts_prompt_start": 2, "routed_experts_layout": "full"}
    for _ in range(2):
        params = SamplingParams()
        meta = settle(frontend, params, **ours).meta.model_dump()
        assert meta == {**INFO, "start": 2, "encoding": "npy", "layout": "full"}
        assert params.return_routed_experts is True
        assert params.routed_experts_prompt_start == 2
        assert params.routed_experts_layout == "full"
    assert frontend.engine_client.calls == ["get_routed_experts_info"]


def test_what_a_request_cannot_have_is_refused():
    frontend = make_frontend()
    message = settle(frontend, SamplingParams(), routed_experts_prompt_start=5)
    assert message == "routed_experts_prompt_start must be in [0, 4], got 5"
    beams = BeamSearchParams(beam_width=2, max_tokens=3)
    assert settle(frontend, beams) is NO_ROUTED_EXPERTS
    assert settle(frontend, beams, return_routed_experts=True) == (
        "return_routed_experts is true, but beam search returns no routed experts: "
        "leave out one of the two"
    )


def test_files_need_a_directory():
    frontend = make_frontend()
    for wanted in (True, False, None):
        ours = {"return_routed_experts": wanted, "routed_experts_encoding": "file"}
        assert settle(frontend, SamplingParams(), **ours) == (
            "routed_experts_encoding is file, but the server runs without "
            "--routed-experts-dir"
        )
    frontend.files = object()
    answer = settle(frontend, SamplingParams(), routed_experts_encoding="file")
    assert answer.meta.encoding == "file"


def test_engine_that_does_not_know_the_flag_returns_none():
    frontend, params = RoutedExpertsFrontend(Engine()), SamplingParams()
    assert settle(frontend, params) is NO_ROUTED_EXPERTS
    assert frontend.engine_client.calls == [] and not params.return_routed_experts
