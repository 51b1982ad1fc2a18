# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fields of routed experts on /inference/v1/generate."""

import inspect

import pytest
from pydantic import ValidationError

from vllm.entrypoints.serve.disagg.protocol import (
    GenerateRequest,
    GenerateResponse,
    GenerateResponseChoice,
    GenerateResponseStreamChoice,
)
from vllm.entrypoints.serve.disagg.serving import ServingTokens

NAMES = {"routed_experts", "prompt_routed_experts", "routed_experts_meta"}


def make_request(**fields: object) -> GenerateRequest:
    return GenerateRequest(token_ids=[1], sampling_params={}, **fields)


def test_request_takes_the_fields_on_top_and_hands_on_what_it_sets():
    request = make_request(return_routed_experts=True, routed_experts_prompt_start=1)
    assert request.routed_experts_fields() == {
        "return_routed_experts": True,
        "routed_experts_prompt_start": 1,
    }
    assert make_request().routed_experts_fields() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("routed_experts_encoding", "json"), ("routed_experts_layout", "joined")],
)
def test_unknown_value_is_refused_with_the_allowed_ones(name: str, value: str):
    with pytest.raises(ValidationError) as caught:
        make_request(**{name: value})
    (error,) = caught.value.errors()
    assert error["loc"] == (name,)
    allowed = ["'npy'", "'list'"] if "encoding" in name else ["'split'", "'full'"]
    assert all(word in error["msg"] for word in allowed)


def test_answer_without_rows_has_none_of_the_fields():
    choice = GenerateResponseChoice(index=0, token_ids=[1])
    answer = GenerateResponse(choices=[choice])
    assert not NAMES & answer.model_dump().keys()
    assert not NAMES & choice.model_dump().keys()
    streamed = GenerateResponseStreamChoice(index=0, token_ids=[1])
    assert not NAMES & streamed.model_dump().keys()


def test_generators_take_what_subclasses_know():
    def parameters(name: str) -> str:
        return " ".join(inspect.signature(getattr(ServingTokens, name)).parameters)

    assert parameters("serve_tokens_stream_generator") == (
        "self request result_generator request_id model_name request_metadata"
    )
    assert parameters("serve_tokens_full_generator") == (
        "self request result_generator request_id model_name request_metadata"
    )
