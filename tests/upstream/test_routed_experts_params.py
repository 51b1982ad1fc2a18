# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a request may ask for."""

from types import SimpleNamespace

import pytest

from vllm.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    verify_routed_experts,
)
from vllm.v1.engine.async_llm import AsyncLLM

ON = SimpleNamespace(enable_return_routed_experts=True)
OFF = SimpleNamespace(enable_return_routed_experts=False)


@pytest.mark.parametrize("start", [0, 1, 4, 5])
def test_start_within_the_prompt_is_accepted(start: int):
    verify_routed_experts(SamplingParams(routed_experts_prompt_start=start), ON, 5)


@pytest.mark.parametrize("start", [-1, 6])
def test_start_outside_of_the_prompt_is_refused_with_its_range(start: int):
    params = BeamSearchParams(
        beam_width=2, max_tokens=1, routed_experts_prompt_start=start
    )
    with pytest.raises(ValueError) as caught:
        verify_routed_experts(params, ON, 5)
    assert str(caught.value) == (
        f"routed_experts_prompt_start must be in [0, 5], got {start}"
    )


def test_rows_that_the_server_does_not_keep_are_refused():
    with pytest.raises(ValueError) as caught:
        verify_routed_experts(SamplingParams(return_routed_experts=True), OFF, 5)
    assert str(caught.value) == (
        "return_routed_experts is true, but the server runs without "
        "--enable-return-routed-experts"
    )


@pytest.mark.parametrize("wanted", [None, False])
def test_request_that_wants_none_passes_on_any_server(wanted: bool | None):
    verify_routed_experts(SamplingParams(return_routed_experts=wanted), OFF, 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("return_routed_experts", "yes"),
        ("return_routed_experts", 1),
        ("routed_experts_prompt_start", True),
        ("routed_experts_prompt_start", 1.0),
    ],
)
def test_wrong_types_are_refused(name: str, value: object):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "wanted", [{"return_routed_experts": True}, {"routed_experts_prompt_start": 2}]
)
def test_streaming_input_that_wants_rows_is_refused(wanted: dict):
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, **wanted)
    with pytest.raises(ValueError, match="^Input streaming returns no routed experts"):
        AsyncLLM._validate_streaming_input_sampling_params(params)


@pytest.mark.parametrize("wanted", [None, False])
def test_streaming_input_that_wants_none_is_accepted(wanted: bool | None):
    params = SamplingParams(
        output_kind=RequestOutputKind.DELTA, return_routed_experts=wanted
    )
    AsyncLLM._validate_streaming_input_sampling_params(params)
