# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fields of routed experts on /v1/chat/completions."""

import pytest
from pydantic import ValidationError

from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.engine.protocol import DeltaMessage

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("start", [0, 3])
def test_request_hands_on_the_fields_that_it_sets(start: int):
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


def test_batch_of_chats_refuses_to_return_rows():
    with pytest.raises(ValidationError, match="do not return routed experts"):
        BatchChatCompletionRequest(messages=[MESSAGES], return_routed_experts=True)
