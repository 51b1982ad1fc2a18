# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What --enable-return-routed-experts refuses by the configuration, in one line."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

import vllm.platforms
from vllm.config import ECTransferConfig, KVTransferConfig, VllmConfig
from vllm.config.routed_experts import check_routed_experts_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler

MAX_MODEL_LEN = 512
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "max_position_embeddings": MAX_MODEL_LEN,
}
DENSE = MOE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
DENSE.pop("num_experts")
# Counts its experts where vLLM does not look.
DBRX = {
    "architectures": ["DbrxForCausalLM"],
    "model_type": "dbrx",
    "d_model": 32,
    "n_heads": 2,
    "n_layers": 2,
    "max_seq_len": MAX_MODEL_LEN,
    "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2},
}
EC = {"ec_connector": "ECExampleConnector", "ec_buffer_device": "cpu"}


def layers(*types: str, window: int = 16) -> dict[str, Any]:
    windows = {"use_sliding_window": True, "sliding_window": window}
    return MOE | {"layer_types": list(types)} | windows


def offloading(connector: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": 2**30} | extra,
    )


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Configure an engine for a model of this config, as a server does."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def configure(hf_config: dict[str, Any], **options: Any) -> VllmConfig:
        (tmp_path / "config.json").write_text(json.dumps(hf_config))
        options = {"enable_return_routed_experts": True, "dtype": "float32"} | options
        return EngineArgs(str(tmp_path), **options).create_engine_config()

    return configure


@pytest.mark.parametrize(
    ("hf_config", "options"),
    [
        (MOE, {}),
        (DBRX, {}),
        (layers("full_attention", "sliding_attention"), {}),
        (layers("linear_attention", "full_attention"), {}),
        (layers(*["sliding_attention"] * 2, window=MAX_MODEL_LEN), {}),
        (layers(*["sliding_attention"] * 2), {"disable_sliding_window": True}),
        (layers(*["sliding_attention"] * 2), {"max_model_len": 16}),
        (MOE, {"scheduler_cls": Scheduler}),
        (MOE, {"pipeline_parallel_size": 2}),
        (
            MOE,
            {"ec_transfer_config": ECTransferConfig(**EC, ec_role="ec_both")},
        ),
        (DENSE, {"enable_return_routed_experts": False, "kv_offloading_size": 1}),
        (MOE, {"kv_offloading_size": 1}),
        (MOE, {"kv_transfer_config": offloading("SimpleCPUOffloadConnector")}),
    ],
)  # fmt: skip
def test_what_can_return_rows_is_accepted(configure, hf_config, options):
    configure(hf_config, **options)


def test_prefix_caching_and_chunked_prefill_stay_on(configure):
    config = configure(MOE)
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill


def test_the_config_of_a_model_within_the_model_is_accepted(configure):
    config = configure(MOE)
    config.with_hf_config(config.model_config.hf_config)


class OwnScheduler:
    """Schedules without knowing of routed experts."""


@pytest.mark.parametrize(
    ("hf_config", "options", "named"),
    [
        (DENSE, {}, "the dense model {model}"),
        (MOE, {"runner": "pooling"}, "--runner pooling"),
        (
            layers("sliding_attention", "linear_attention"),
            {},
            "layers without full attention",
        ),
        (layers(*["linear_attention"] * 2), {}, "layers without full attention"),
        (
            MOE,
            {"ubatch_size": 2, "all2all_backend": "deepep_low_latency"},
            "--enable-dbo",
        ),
        (
            MOE,
            {
                "pipeline_parallel_size": 2,
                "distributed_executor_backend": "external_launcher",
            },
            "--pipeline-parallel-size with the external_launcher",
        ),
        (MOE, {"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        (
            MOE,
            {"kv_transfer_config": offloading("OffloadingConnector", spec_name="Own")},
            "--kv-transfer-config with OffloadingConnector and spec_name Own",
        ),
        (
            MOE,
            {"kv_offloading_size": 2, "kv_offloading_backend": "lmcache"},
            "--kv-offloading-size 2",
        ),
        (
            MOE,
            {"kv_transfer_config": KVTransferConfig("Nixl", kv_role="kv_both")},
            "--kv-transfer-config with Nixl",
        ),
        (
            MOE,
            {
                "kv_transfer_config": KVTransferConfig(
                    "MultiConnector",
                    kv_role="kv_both",
                    kv_connector_extra_config={
                        "connectors": [
                            {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
                        ]
                    },
                )
            },
            "--kv-transfer-config with MultiConnector",
        ),
        (
            MOE,
            {"ec_transfer_config": ECTransferConfig(**EC, ec_role="ec_producer")},
            "--ec-transfer-config with ec_role ec_producer",
        ),
        (
            MOE,
            {"scheduler_cls": OwnScheduler},
            f"--scheduler-cls {OwnScheduler}",
        ),
        (
            DENSE,
            {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"},
            "the dense model {model}, --kv-offloading-size 1",
        ),
    ],
)  # fmt: skip
def test_every_option_in_the_way_is_named(
    configure, tmp_path, hf_config, options, named
):
    with pytest.raises(ValueError) as caught:
        configure(hf_config, **options)
    assert refusal(named.format(model=tmp_path)) in str(caught.value)


def refusal(named: str) -> str:
    return (
        f"--enable-return-routed-experts does not work with {named}. "
        "Start without one or the other."
    )


def test_simulated_routing_is_refused(configure, monkeypatch):
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    with pytest.raises(ValueError) as caught:
        configure(MOE)
    named = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random"
    assert refusal(named) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
            "decode context parallelism (decode_context_parallel_size=2)",
        ),
        (
            {"prefill_context_parallel_size": 2},
            "prefill context parallelism (prefill_context_parallel_size=2)",
        ),
    ],
)  # fmt: skip
def test_parallelism_that_is_not_built_is_refused_as_stock_does(
    configure, options, named
):
    with pytest.raises(ValueError) as caught:
        configure(MOE | {"num_attention_heads": 4}, **options)
    assert (
        f"--enable-return-routed-experts is not yet validated with: {named}. Disable "
        "these features or omit --enable-return-routed-experts."
    ) in str(caught.value)


def test_other_platforms_and_elastic_ep_are_refused(configure, monkeypatch):
    config = configure(MOE)
    config.parallel_config.enable_elastic_ep = True
    platform = SimpleNamespace(
        device_name="xpu", is_cuda_alike=lambda: False, is_cpu=lambda: False
    )
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    with pytest.raises(ValueError) as caught:
        check_routed_experts_config(config)
    assert str(caught.value) == refusal("--enable-elastic-ep, the platform xpu")
