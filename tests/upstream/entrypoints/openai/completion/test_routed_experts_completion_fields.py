# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fields of routed experts on /v1/completions."""

import numpy as np
import pytest

from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
)
from vllm.entrypoints.openai.engine.protocol import UsageInfo
from vllm.entrypoints.serve.routed_experts.encoding import RoutedExpertsRows


@pytest.mark.parametrize("wanted", [None, True, False])
def test_request_hands_on_the_fields_that_it_sets(wanted: bool | None):
    request = CompletionRequest(prompt="a", return_routed_experts=wanted)
    expected = {} if wanted is None else {"return_routed_experts": wanted}
    assert request.routed_experts_fields() == expected


def test_choice_without_rows_is_that_of_the_base():
    choice = CompletionResponseChoice(index=0, text="a").model_dump()
    assert choice["routed_experts"] is None
    assert "prompt_routed_experts" not in choice
    streamed = CompletionResponseStreamChoice(index=0, text="a").model_dump()
    assert not {"routed_experts", "prompt_routed_experts"} & streamed.keys()


@pytest.mark.parametrize("encoding", ["npy", "list"])
def test_response_reads_back_what_it_wrote(encoding: str):
    rows = RoutedExpertsRows(np.zeros((2, 3, 2), "uint8"), encoding)
    choice = CompletionResponseChoice(index=0, text="", routed_experts=rows)
    response = CompletionResponse(model="m", choices=[choice], usage=UsageInfo())
    read = CompletionResponse.model_validate_json(response.model_dump_json())
    assert read.choices[0].routed_experts == rows.json_value()
