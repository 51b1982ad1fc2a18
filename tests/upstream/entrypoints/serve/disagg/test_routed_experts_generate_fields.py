# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fields of routed experts on /inference/v1/generate."""

import pytest
from pydantic import ValidationError

from vllm.entrypoints.serve.disagg.protocol import (
    GenerateRequest,
    GenerateResponse,
    GenerateResponseChoice,
    GenerateResponseStreamChoice,
)

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


FIELDS = [
    "return_routed_experts",
    "routed_experts_prompt_start",
    "routed_experts_encoding",
    "routed_experts_layout",
]


@pytest.mark.parametrize("name", FIELDS)
def test_null_is_the_same_as_leaving_the_field_out(name: str):
    assert make_request(**{name: None}).routed_experts_fields() == {}


@pytest.mark.parametrize("where", ["top", "sampling_params"])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [(FIELDS[0], value, "boolean") for value in ("yes", "false", 1, 0, 1.0, [], {})]
    + [(FIELDS[1], value, "integer") for value in ("3", 2.0, 1.5, True, [], {})],
)
def test_types_are_strict(where: str, name: str, value: object, expected: str):
    fields = {name: value}
    body = {"token_ids": [1], "sampling_params": {}}
    (body if where == "top" else body["sampling_params"]).update(fields)
    with pytest.raises(ValidationError) as caught:
        GenerateRequest.model_validate(body)
    (error,) = caught.value.errors()
    assert error["loc"] == (name,)
    assert error["msg"] == f"Input should be a valid {expected}"


@pytest.mark.parametrize("top", [{}, {"routed_experts_prompt_start": None}])
def test_sampling_params_may_hold_the_fields_that_the_engine_reads(top: dict):
    params = {"routed_experts_prompt_start": 4, "return_routed_experts": None}
    body = {"token_ids": [1], "sampling_params": params, **top}
    request = GenerateRequest.model_validate(body)
    assert request.routed_experts_fields() == {"routed_experts_prompt_start": 4}
    assert params.keys() == body["sampling_params"].keys()  # left as the caller's
    request = GenerateRequest.model_validate(body | {"routed_experts_prompt_start": 5})
    assert request.routed_experts_prompt_start == 5


def test_answer_without_rows_has_none_of_the_fields():
    choice = GenerateResponseChoice(index=0, token_ids=[1])
    answer = GenerateResponse(choices=[choice])
    assert not NAMES & answer.model_dump().keys()
    assert not NAMES & choice.model_dump().keys()
    streamed = GenerateResponseStreamChoice(index=0, token_ids=[1])
    assert not NAMES & streamed.model_dump().keys()
