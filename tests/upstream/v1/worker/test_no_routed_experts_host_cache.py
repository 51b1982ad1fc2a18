# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""No cache of routed experts by request, and no copy per layer to fill it."""

import json
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

REMOVED = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
PROMPT = [1, 2, 3, 4, 5]


def test_removed_module_is_gone_and_nothing_names_it():
    assert find_spec(REMOVED) is None
    root = Path(vllm.__file__).parent
    name = REMOVED.rpartition(".")[2]
    sources = list(root.rglob("*.py"))
    assert root / "v1/worker/gpu_model_runner.py" in sources
    assert [path for path in sources if name in path.read_text("utf-8")] == []


def test_no_custom_op_copies_ids_layer_by_layer():
    assert not hasattr(torch.ops.vllm, "capture_routing")


def test_worker_has_no_second_life_of_requests():
    """Rows by request had to be started, freed and preempted beside the KV cache."""
    assert "routed_experts_dict" not in {f.name for f in fields(ModelRunnerOutput)}
    assert not hasattr(GPUModelRunner, "init_routed_experts_capturer")
    assert not hasattr(GPUModelRunner, "_bind_routed_experts_capturer")


class Kernels(TorchDispatchMode):
    """Every operation that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_monolithic", [False, True])
def test_pass_through_a_layer_runs_nothing_beside_its_router_and_kernel(
    is_monolithic: bool,
):
    hidden, logits = torch.ones(4, 8), torch.ones(4, 16)
    weights, ids = torch.ones(4, 2), torch.tensor([[1, 2]] * 4, dtype=torch.int32)
    seen = []

    def kernel(**kwargs) -> torch.Tensor:
        seen.append(kwargs.get("topk_ids"))
        return hidden

    runner = MoERunner.__new__(MoERunner)
    torch.nn.Module.__init__(runner)
    runner._shared_experts = None
    runner.router = SimpleNamespace(
        capture_fn=None, select_experts=lambda **_: (weights, ids)
    )
    runner._quant_method = SimpleNamespace(
        is_monolithic=is_monolithic, apply=kernel, apply_monolithic=kernel
    )
    # The attribute that the removed module left on every layer.
    left = torch.full((8, 2), -1, dtype=torch.int16)
    layer = SimpleNamespace(_routing_replay_out=left)
    with Kernels() as kernels:
        _, out = runner._apply_quant_method(layer, hidden, logits, None)
    assert kernels.names == []
    assert out is hidden
    assert seen[0] is (None if is_monolithic else ids)
    assert (left == -1).all()


CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def make_scheduler(model: Path) -> Scheduler:
    (model / "config.json").write_text(json.dumps(CONFIG))
    spec = FullAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=64,
        ),
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=64,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=4, enable_prefix_caching=False),
    )
    vllm_config.cache_config.num_gpu_blocks = 17
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(17, [], [KVCacheGroupSpec(["full"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=4,
    )


def test_step_without_routed_experts_is_answered_without(tmp_path: Path):
    scheduler = make_scheduler(tmp_path)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    scheduler.add_request(Request("0", list(PROMPT), params, None))
    answers: list[EngineCoreOutput] = []
    for token_id in (7, 8):
        scheduled = scheduler.schedule()
        output = ModelRunnerOutput(["0"], {"0": 0}, [[token_id]])
        answers += scheduler.update_from_output(scheduled, output)[0].outputs
    assert [answer.new_token_ids for answer in answers] == [[7], [8]]
    assert [answer.routed_experts for answer in answers] == [None, None]
    assert answers[1].finish_reason == FinishReason.LENGTH
    assert not scheduler.requests


def test_answer_without_routed_experts_has_none():
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    request = EngineCoreRequest(
        request_id="0",
        prompt_token_ids=list(PROMPT),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="0",
    )
    processor.add_request(request, None)
    processor.process_outputs([EngineCoreOutput("0", [7])])
    last = EngineCoreOutput("0", [8], finish_reason=FinishReason.LENGTH)
    (answer,) = processor.process_outputs([last]).request_outputs
    assert answer.finished
    assert answer.prompt_routed_experts is None
    assert answer.outputs[0].token_ids == [7, 8]
    assert answer.outputs[0].routed_experts is None
