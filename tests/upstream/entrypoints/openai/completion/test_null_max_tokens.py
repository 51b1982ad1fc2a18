# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A completion whose max_tokens is null is answered, not an error."""

import pytest

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.engine.protocol import RequestResponseMetadata
from vllm.outputs import CompletionOutput, RequestOutput


@pytest.mark.parametrize("max_tokens", [None, 2])
@pytest.mark.parametrize(("echo", "text"), [(False, "c"), (True, "abc")])
def test_answer_has_the_text(max_tokens: int | None, echo: bool, text: str):
    serving = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    serving.enable_prompt_tokens_details = False
    serving.system_fingerprint = None
    request = CompletionRequest(prompt="ab", max_tokens=max_tokens, echo=echo)
    choice = CompletionOutput(
        index=0,
        text="c",
        token_ids=[3],
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="length",
    )
    output = RequestOutput(
        request_id="0",
        prompt="ab",
        prompt_token_ids=[1, 2],
        prompt_logprobs=None,
        outputs=[choice],
        finished=True,
    )
    answer = serving.request_output_to_completion_response(
        [output],
        request,
        "cmpl-0",
        created_time=0,
        model_name="m",
        tokenizer=None,
        request_metadata=RequestResponseMetadata(request_id="cmpl-0"),
    )
    assert [choice.text for choice in answer.choices] == [text]
    assert answer.usage == answer.usage.model_copy(update={"completion_tokens": 1})
