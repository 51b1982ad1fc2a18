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
from vllm.entrypoints.serve.routed_experts.frontend import NO_ROUTED_EXPERTS

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


@pytest.mark.parametrize(
    "name",
    ["chat_completion_stream_generator", "chat_completion_full_generator"],
)
def test_subclasses_may_call_the_generators_as_before(name: str):
    parameters = inspect.signature(getattr(OpenAIServingChat, name)).parameters
    assert parameters["experts"].default is NO_ROUTED_EXPERTS
