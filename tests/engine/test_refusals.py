"""What cannot be right is refused when the engine is configured, before weights load."""

from __future__ import annotations

import re

import pytest

END = " Start without one or the other."


def configure(model, **options):
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(str(model), dtype="float32", enable_return_routed_experts=True, **options)
    return args.create_engine_config()


def refused(what):
    return re.escape(f"--enable-return-routed-experts does not work with {what}." + END)


def test_dense_model_is_refused(models):
    model = models("dense")
    with pytest.raises(ValueError, match=refused(f"the dense model {model}")):
        configure(model)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size > 1"),
        (
            {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
            "--decode-context-parallel-size > 1",
        ),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size > 1"),
    ],
)
def test_parallelism_that_is_not_built_is_refused(models, options, what):
    with pytest.raises(ValueError, match=refused(what)):
        configure(models("moe"), **options)


def test_connector_that_loads_blocks_from_outside_is_refused(models):
    from vllm.config import KVTransferConfig

    outside = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match=refused("--kv-transfer-config and --kv-offloading-size")):
        configure(models("moe"), kv_transfer_config=outside)


def test_everything_else_by_default_is_accepted(models):
    config = configure(models("moe"))
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill
    assert config.model_config.enable_return_routed_experts
