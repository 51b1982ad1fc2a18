# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A generate request that leaves max_tokens out means up to the model length."""

import json

import pytest

from vllm.entrypoints.serve.disagg.protocol import GenerateRequest
from vllm.sampling_params import SamplingParams


def parse(sampling_params: object) -> GenerateRequest:
    return GenerateRequest.model_validate(
        {"token_ids": [1], "sampling_params": sampling_params}
    )


@pytest.mark.parametrize(
    ("given", "max_tokens"),
    [({}, None), ({"max_tokens": None}, None), ({"max_tokens": 16}, 16)],
)
def test_only_a_number_limits(given: dict, max_tokens: int | None):
    assert parse(given).sampling_params.max_tokens == max_tokens


@pytest.mark.parametrize("max_tokens", [None, 1, 16, 17])
def test_written_request_reads_back_the_same(max_tokens: int | None):
    # As the render endpoints write it: 16 is a default of SamplingParams.
    written = parse(SamplingParams(max_tokens=max_tokens, seed=3)).model_dump()
    params = written["sampling_params"]
    assert (params["max_tokens"], params["seed"]) == (max_tokens, 3)
    read = GenerateRequest.model_validate_json(json.dumps(written))
    assert read.sampling_params.max_tokens == max_tokens


def test_schema_says_so():
    schema = GenerateRequest.model_json_schema()
    described = schema["properties"]["sampling_params"]["description"]
    assert "max_tokens left out or null: as many as the model length" in described
