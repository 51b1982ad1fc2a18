# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fields of routed experts on /v1/chat/completions."""

import inspect

import pytest

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.engine.protocol import DeltaMessage

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("start", [0, 3])
def test_request_tells_whether_the_field_was_set(start: int):
    fields = {"routed_experts_prompt_start": start}
    request = ChatCompletionRequest(messages=MESSAGES, **fields)
    assert request.routed_experts_fields() == fields
    assert ChatCompletionRequest(messages=MESSAGES).routed_experts_fields() == {}


def test_choice_without_rows_is_that_of_the_base():
    message = ChatMessage(role="assistant", content="a")
    choice = ChatCompletionResponseChoice(index=0, message=message).model_dump()
    assert choice["routed_experts"] is None
    streamed = ChatCompletionResponseStreamChoice(index=0, delta=DeltaMessage())
    assert "routed_experts" not in streamed.model_dump()


def test_generators_take_what_subclasses_know():
    def parameters(name: str) -> str:
        return " ".join(inspect.signature(getattr(OpenAIServingChat, name)).parameters)

    assert parameters("chat_completion_stream_generator") == (
        "self request result_generator request_id model_name conversation "
        "tokenizer request_metadata reasoning_parser chat_template_kwargs"
    )
    assert parameters("chat_completion_full_generator") == (
        "self request result_generator request_id model_name conversation "
        "tokenizer request_metadata reasoning_parser"
    )
