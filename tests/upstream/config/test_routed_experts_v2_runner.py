# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The V2 model runner has nothing left to refuse about routed experts."""

from types import SimpleNamespace

import pytest

from vllm.config import VllmConfig


def make_config(**model: object) -> SimpleNamespace:
    defaults = {
        "has_inner_state": False,
        "logits_processors": None,
        "enable_return_routed_experts": True,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**(defaults | model)),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, enable_dbo=False
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        speculative_config=None,
        ec_transfer_config=None,
    )


def test_routed_experts_are_accepted():
    VllmConfig._validate_v2_model_runner(make_config())


def test_what_it_lacks_is_still_refused():
    with pytest.raises(ValueError) as caught:
        VllmConfig._validate_v2_model_runner(make_config(has_inner_state=True))
    assert str(caught.value) == (
        "VLLM_USE_V2_MODEL_RUNNER does not yet support: hybrid/mamba models"
    )
