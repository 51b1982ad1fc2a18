# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fields of routed experts on /v1/completions."""

import inspect

import pytest

from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
)
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.routed_experts.frontend import NO_ROUTED_EXPERTS


@pytest.mark.parametrize("wanted", [None, True, False])
def test_request_tells_whether_the_field_was_set(wanted: bool | None):
    fields = {} if wanted is None else {"return_routed_experts": wanted}
    request = CompletionRequest(prompt="a", **fields)
    assert request.routed_experts_fields() == fields


def test_choice_without_rows_is_that_of_the_base():
    choice = CompletionResponseChoice(index=0, text="a").model_dump()
    assert choice["routed_experts"] is None
    assert "prompt_routed_experts" not in choice
    streamed = CompletionResponseStreamChoice(index=0, text="a").model_dump()
    assert not {"routed_experts", "prompt_routed_experts"} & streamed.keys()


@pytest.mark.parametrize(
    "name",
    ["completion_stream_generator", "request_output_to_completion_response"],
)
def test_subclasses_may_call_the_generators_as_before(name: str):
    parameters = inspect.signature(getattr(OpenAIServingCompletion, name)).parameters
    assert parameters["experts"].default is NO_ROUTED_EXPERTS
