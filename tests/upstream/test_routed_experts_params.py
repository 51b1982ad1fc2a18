# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a request may ask for."""

from types import SimpleNamespace

import pytest

from vllm.routed_experts_params import settle_routed_experts
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

ON = SimpleNamespace(enable_return_routed_experts=True, routed_experts_layout="full")
OFF = SimpleNamespace(enable_return_routed_experts=False, routed_experts_layout="full")


@pytest.mark.parametrize("start", [0, 1, 4, 5])
def test_start_within_the_prompt_is_accepted(start: int):
    settle_routed_experts(SamplingParams(routed_experts_prompt_start=start), ON, 5)


@pytest.mark.parametrize("start", [-1, 6])
def test_start_outside_of_the_prompt_is_refused_with_its_range(start: int):
    params = SamplingParams(routed_experts_prompt_start=start)
    with pytest.raises(ValueError) as caught:
        settle_routed_experts(params, ON, 5)
    assert str(caught.value) == (
        f"routed_experts_prompt_start must be in [0, 5], got {start}"
    )


@pytest.mark.parametrize(
    ("wanted", "config", "settled"),
    [(None, ON, "full"), ("split", ON, "split"), (None, OFF, None)],
)
def test_layout_is_the_engine_s_where_the_request_names_none(wanted, config, settled):
    params = SamplingParams(routed_experts_layout=wanted)
    settle_routed_experts(params, config, 5)
    assert params.routed_experts_layout == settled


def test_rows_that_the_server_does_not_keep_are_refused():
    with pytest.raises(ValueError) as caught:
        settle_routed_experts(SamplingParams(return_routed_experts=True), OFF, 5)
    assert str(caught.value) == (
        "return_routed_experts is true, but the server runs without "
        "--enable-return-routed-experts"
    )


@pytest.mark.parametrize("wanted", [None, False])
def test_request_that_wants_none_passes_on_any_server(wanted: bool | None):
    settle_routed_experts(SamplingParams(return_routed_experts=wanted), OFF, 5)


@pytest.mark.parametrize(
    ("name", "allowed", "value"),
    [
        ("return_routed_experts", "a bool or None", "yes"),
        ("return_routed_experts", "a bool or None", 1),
        ("routed_experts_prompt_start", "an int", True),
        ("routed_experts_prompt_start", "an int", 1.0),
        ("routed_experts_layout", "'split', 'full' or None", "joined"),
    ],
)
def test_other_values_are_refused_with_the_allowed_ones(name, allowed, value):
    for make in (SamplingParams, SamplingParams.from_optional):
        with pytest.raises(ValueError) as caught:
            make(**{name: value})
        assert str(caught.value) == f"{name} must be {allowed}, got {value!r}."


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
