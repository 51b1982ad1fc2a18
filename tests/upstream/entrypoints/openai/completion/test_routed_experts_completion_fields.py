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


def test_generators_take_what_subclasses_know():
    def parameters(name: str) -> str:
        return " ".join(
            inspect.signature(getattr(OpenAIServingCompletion, name)).parameters
        )

    assert parameters("completion_stream_generator") == (
        "self request engine_inputs result_generator request_id "
        "created_time model_name num_prompts tokenizer request_metadata"
    )
    assert parameters("request_output_to_completion_response") == (
        "self final_res_batch request request_id created_time model_name "
        "tokenizer request_metadata"
    )
