# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What --enable-return-routed-experts refuses, all of it in one line."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import VllmConfig


def make_config(
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    **rest: Any,
) -> SimpleNamespace:
    """What the check reads, of a server that it accepts."""
    defaults = {
        "model": "m",
        "is_moe": True,
        "runner_type": "generate",
        "hf_text_config": SimpleNamespace(),
    }
    sizes = {
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
        "enable_elastic_ep": False,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**(defaults | (model or {}))),
        parallel_config=SimpleNamespace(**(sizes | (parallel or {}))),
        cache_config=SimpleNamespace(
            kv_sharing_fast_prefill=rest.get("kv_sharing_fast_prefill", False)
        ),
        kv_transfer_config=rest.get("kv_transfer_config"),
    )


def layers(*types: str) -> dict[str, Any]:
    return {"hf_text_config": SimpleNamespace(layer_types=list(types))}


@pytest.mark.parametrize(
    "config",
    [
        make_config(),
        make_config(layers("full_attention", "sliding_attention")),
        make_config(layers("linear_attention", "full_attention")),
        make_config(layers()),
    ],
)
def test_moe_model_with_full_attention_is_accepted(config: SimpleNamespace):
    VllmConfig._validate_return_routed_experts(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (make_config({"is_moe": False}), "the dense model m"),
        (make_config({"runner_type": "pooling"}), "--runner pooling"),
        (
            make_config(layers("sliding_attention", "linear_attention")),
            "a model without full-attention layers",
        ),
        (
            make_config(parallel={"pipeline_parallel_size": 2}),
            "--pipeline-parallel-size > 1",
        ),
        (
            make_config(parallel={"prefill_context_parallel_size": 2}),
            "--prefill-context-parallel-size > 1",
        ),
        (
            make_config(parallel={"decode_context_parallel_size": 2}),
            "--decode-context-parallel-size > 1",
        ),
        (make_config(parallel={"use_ubatching": True}), "--enable-dbo"),
        (make_config(parallel={"enable_elastic_ep": True}), "--enable-elastic-ep"),
        (
            make_config(kv_transfer_config=object()),
            "--kv-transfer-config and --kv-offloading-size",
        ),
        (
            make_config({"is_moe": False}, {"use_ubatching": True}),
            "the dense model m, --enable-dbo",
        ),
    ],
)
def test_every_option_in_the_way_is_named(config: SimpleNamespace, named: str):
    with pytest.raises(ValueError) as caught:
        VllmConfig._validate_return_routed_experts(config)
    assert str(caught.value) == (
        f"--enable-return-routed-experts does not work with {named}. "
        "Start without one or the other."
    )
