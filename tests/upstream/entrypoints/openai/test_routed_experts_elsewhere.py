# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Endpoints whose answers have no place for rows ask the engine for none."""

import pytest

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.speech_to_text.protocol import (
    TranscriptionRequest,
    TranslationRequest,
)


def test_responses_ask_for_no_rows():
    params = ResponsesRequest(input="a").to_sampling_params(16, {})
    assert params.return_routed_experts is False


@pytest.mark.parametrize("request_type", [TranscriptionRequest, TranslationRequest])
def test_speech_asks_for_no_rows(request_type: type):
    request = request_type.model_construct(
        **{name: field.default for name, field in request_type.model_fields.items()}
    )
    assert request.to_sampling_params(16, {}).return_routed_experts is False
