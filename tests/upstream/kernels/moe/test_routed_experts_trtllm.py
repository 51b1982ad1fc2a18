# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Capture from the TRT-LLM kernels that route inside, with FlashInfer replaced.

The kernels need a Blackwell GPU. Their stand-ins take the arguments of the real
functions, check the routing-replay output as FlashInfer does, and write the experts
with the largest logits to it. All between the layer and the function is vLLM's own.
"""

import contextlib
import re
import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import vllm.utils.flashinfer
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
    nvfp4_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.experts.trtllm_bf16_moe import (
    TrtLlmBf16Experts,
)
from vllm.model_executor.layers.fused_moe.experts.trtllm_fp8_moe import (
    TrtLlmFp8ExpertsMonolithic,
)
from vllm.model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe import (
    TrtLlmMxfp4ExpertsMonolithic,
)
from vllm.model_executor.layers.fused_moe.experts.trtllm_nvfp4_moe import (
    TrtLlmNvFp4ExpertsMonolithic,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import (
    FusedMoEMethodBase,
)
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPMonolithic,
)
from vllm.model_executor.layers.fused_moe.routed_experts import (
    bind_routed_experts,
    check_capture_support,
)
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

NUM_LAYERS, MAX_NUM_TOKENS, NUM_EXPERTS, TOP_K = 4, 8, 400, 3
HIDDEN = 128


# FlashInfer.


def choose(routing_logits: torch.Tensor, top_k: int, out: torch.Tensor | None) -> None:
    """What every kernel does with its routing-replay output, and its checks."""
    if out is None:
        return
    assert out.dtype == torch.int16
    assert out.ndim == 2 and out.shape[1] == top_k
    assert out.is_contiguous()
    assert out.shape[0] >= routing_logits.shape[0]
    out[: len(routing_logits)] = routing_logits.topk(top_k).indices


def make_kernel_function(calls: list[torch.Tensor | None]) -> Callable:
    """A kernel, which appends the output that it was handed to `calls`."""

    def kernel(routing_logits, hidden_states, top_k, routing_replay_out=None, **rest):
        calls.append(routing_replay_out)
        choose(routing_logits, top_k, routing_replay_out)
        return [hidden_states]

    return kernel


def trtllm_bf16_moe_of_old(
    routing_logits,
    routing_bias,
    hidden_states,
    gemm1_weights,
    gemm2_weights,
    num_experts,
    top_k,
    n_group,
    topk_group,
    intermediate_size,
    local_expert_offset,
    local_num_experts,
    routing_method_type,
):
    """The kernel's function before it had a routing-replay output."""
    return hidden_states


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """Put a FlashInfer of stand-ins in place; return the outputs it will get."""
    calls: list[torch.Tensor | None] = []
    function = make_kernel_function(calls)
    names = ("flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.core")
    modules = {name: ModuleType(name) for name in names}
    root, fused_moe, core = modules.values()
    root.fused_moe, fused_moe.core = fused_moe, core
    kinds = ["Silu", "Gelu", "Swiglu", "Geglu", "Relu2"]
    core.ActivationType = IntEnum("ActivationType", kinds)
    fused_moe.Fp8QuantizationType = IntEnum("Fp8", ["DeepSeekFp8", "MxFp8"])
    fused_moe.WeightLayout = IntEnum("WeightLayout", ["MajorK", "BlockMajorK"])
    for name in (
        "trtllm_bf16_moe",
        "trtllm_fp8_block_scale_moe",
        "trtllm_fp8_per_tensor_scale_moe",
        "trtllm_fp4_block_scale_moe",
    ):
        setattr(fused_moe, name, function)
    root.trtllm_fp4_block_scale_moe = function
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        vllm.utils.flashinfer, "autotune", lambda _: contextlib.nullcontext()
    )
    return calls


# Layers.


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def fp8_config(**options: Any) -> FusedMoEQuantConfig:
    per_expert = scales(NUM_EXPERTS)
    return fp8_w8a8_moe_quant_config(per_expert, per_expert, **options)


def make_quant_config(kind: str) -> FusedMoEQuantConfig:
    one, per_expert = scales(1), scales(NUM_EXPERTS)
    if kind == "bf16":
        return FUSED_MOE_UNQUANTIZED_CONFIG
    if kind == "fp8 per tensor":
        return fp8_config(a1_scale=one, a2_scale=one)
    if kind == "fp8 by blocks":
        return fp8_config(block_shape=[128, 128])
    if kind == "mxfp8":
        return fp8_config(block_shape=[1, 32])
    blocks = scales(NUM_EXPERTS, 8, dtype=torch.float8_e4m3fn)
    if kind == "nvfp4":
        return nvfp4_moe_quant_config(per_expert, per_expert, one, one, blocks, blocks)
    assert kind == "mxfp4"
    return mxfp4_w4a16_moe_quant_config(blocks, blocks)


EXPERTS = {
    "bf16": TrtLlmBf16Experts,
    "fp8 per tensor": TrtLlmFp8ExpertsMonolithic,
    "fp8 by blocks": TrtLlmFp8ExpertsMonolithic,
    "mxfp8": TrtLlmFp8ExpertsMonolithic,
    "nvfp4": TrtLlmNvFp4ExpertsMonolithic,
    "mxfp4": TrtLlmMxfp4ExpertsMonolithic,
}


def make_moe_config(dp_size: int = 1) -> FusedMoEConfig:
    ranks = {f"{name}_rank": 0 for name in ("tp", "pcp", "dp", "ep")}
    sizes = {f"{name}_size": 1 for name in ("tp", "pcp", "ep", "sp")}
    return FusedMoEConfig(
        num_experts=NUM_EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN,
        intermediate_size_per_partition=HIDDEN,
        num_local_experts=NUM_EXPERTS,
        num_logical_experts=NUM_EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig(
            **ranks,
            **sizes,
            dp_size=dp_size,
            use_ep=False,
            all2all_backend="allgather_reducescatter",
            enable_eplb=False,
        ),
        in_dtype=torch.bfloat16,
    )


class WithoutQuantization(MoEPrepareAndFinalizeNoDPEPMonolithic):
    """Hands the inputs to the kernel as they are, with scales beside them."""

    def __init__(self, quant_config: FusedMoEQuantConfig) -> None:
        self.is_scaled = quant_config.quant_dtype is not None

    def prepare(self, a1, router_logits, quant_config, defer_input_quant=False):
        scale = scales(len(a1), HIDDEN, dtype=torch.float8_e4m3fn)
        return a1, scale if self.is_scaled else None, router_logits


def make_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> FusedMoEKernel:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    quant_config = make_quant_config(kind)
    with set_current_vllm_config(VllmConfig()):
        experts = EXPERTS[kind](make_moe_config(), quant_config)
    experts.max_capture_size = MAX_NUM_TOKENS
    return FusedMoEKernel(WithoutQuantization(quant_config), experts)


class QuantMethod(FusedMoEMethodBase):
    """A quantization method around a kernel, as those of vLLM are."""

    def __init__(self, kernel: FusedMoEKernel, **changes: Any) -> None:
        super().__init__(make_moe_config(**changes))
        self.moe_kernel = kernel
        self.experts_cls = type(kernel.fused_experts)

    def create_weights(self, *args, **kwargs):
        raise NotImplementedError

    def get_fused_moe_quant_config(self, layer):
        return self.moe_kernel.fused_experts.quant_config

    def apply_monolithic(self, layer, x, router_logits, input_ids=None):
        empty = torch.empty(0)
        return self.moe_kernel.apply_monolithic(
            x,
            empty,
            empty,
            router_logits,
            activation=MoEActivation.SILU,
            global_num_experts=NUM_EXPERTS,
            expert_map=None,
            apply_router_weight_on_input=False,
        )


class Router:
    capture_fn = None

    def set_capture_fn(self, capture_fn):
        self.capture_fn = capture_fn

    def select_experts(self, **kwargs):
        raise AssertionError("a kernel that routes inside needs no router")


class Layer(FusedMoE):
    """A MoE layer without weights."""

    def __init__(self, layer_id: int, method: QuantMethod, enable_eplb: bool = False):
        torch.nn.Module.__init__(self)
        self.layer_name = f"model.layers.{layer_id}.mlp.experts"
        self.top_k = TOP_K
        self.enable_eplb = enable_eplb
        self.moe_config = method.moe
        self.router = Router()
        self.quant_method = method
        self.runner = MoERunner(
            self.layer_name, method.moe, self.router, None, None, None, method, False
        )

    def run(self, logits: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(len(logits), HIDDEN, dtype=torch.bfloat16)
        return self.runner._apply_quant_method(self, hidden, logits, None)[1]


def make_choices(num_tokens: int, layer_id: int) -> torch.Tensor:
    """Ids that depend on token, layer and column; no uint8 holds all of them."""
    token = torch.arange(num_tokens)[:, None]
    return 30 * token + 100 * (layer_id % 2) + 7 * torch.arange(TOP_K) + layer_id


def make_logits(ids: torch.Tensor) -> torch.Tensor:
    logits = torch.zeros(len(ids), NUM_EXPERTS)
    return logits.scatter_(1, ids, torch.arange(TOP_K, 0, -1.0).expand(len(ids), -1))


def bind(*layers: Layer) -> torch.Tensor:
    model = torch.nn.ModuleList(layers)
    device = torch.device("cpu")
    return bind_routed_experts(model, NUM_LAYERS, MAX_NUM_TOKENS, device)[0]


@pytest.fixture(params=EXPERTS)
def kernel(request, monkeypatch: pytest.MonkeyPatch) -> FusedMoEKernel:
    return make_kernel(request.param, monkeypatch)


@pytest.mark.parametrize("num_tokens", [1, 5, MAX_NUM_TOKENS])
def test_kernel_leaves_its_choice_in_the_slice_of_its_layer(
    calls, kernel: FusedMoEKernel, num_tokens: int
):
    layers = [Layer(layer_id, QuantMethod(kernel)) for layer_id in (1, 3)]
    staging = bind(*layers)
    assert staging.shape == (NUM_LAYERS, MAX_NUM_TOKENS, TOP_K)
    assert staging.dtype == torch.int16
    staging[[1, 3]] = -1
    for layer in layers:
        layer.run(make_logits(make_choices(num_tokens, layer.layer_id)))
    for number, out in zip((1, 3), calls, strict=True):
        # The memory itself, not a copy of it.
        assert out.data_ptr() == staging[number].data_ptr()
        chosen = make_choices(num_tokens, number)
        assert staging[number, :num_tokens].tolist() == chosen.tolist()
        assert (staging[number, num_tokens:] == -1).all()
    assert (staging[[0, 2]] == 0).all()


def test_pass_without_capture_asks_for_nothing(calls, kernel: FusedMoEKernel):
    layer = Layer(1, QuantMethod(kernel))
    layer.run(make_logits(make_choices(5, 1)))
    assert calls == [None]


def test_kernel_made_by_loading_weights_again_is_captured(
    calls, monkeypatch: pytest.MonkeyPatch
):
    layer = Layer(1, QuantMethod(make_kernel("bf16", monkeypatch)))
    staging = bind(layer)
    layer.run(make_logits(make_choices(5, 1)))
    layer.quant_method.moe_kernel = make_kernel("bf16", monkeypatch)
    layer.run(make_logits(make_choices(4, 1).flip(0)))
    assert staging[1, :4].tolist() == make_choices(4, 1).flip(0).tolist()
    assert [out.data_ptr() for out in calls] == [staging[1].data_ptr()] * 2


def test_flashinfer_without_the_output_works_while_nobody_captures(calls, monkeypatch):
    fused_moe = sys.modules["flashinfer.fused_moe"]
    monkeypatch.setattr(fused_moe, "trtllm_bf16_moe", trtllm_bf16_moe_of_old)
    layer = Layer(1, QuantMethod(make_kernel("bf16", monkeypatch)))
    layer.run(make_logits(make_choices(5, 1)))


def test_flashinfer_without_the_output_is_refused(calls, monkeypatch):
    fused_moe = sys.modules["flashinfer.fused_moe"]
    monkeypatch.setattr(fused_moe, "trtllm_bf16_moe", trtllm_bf16_moe_of_old)
    layer = Layer(1, QuantMethod(make_kernel("bf16", monkeypatch)))
    message = (
        "--enable-return-routed-experts: the MoE kernel TrtLlmBf16Experts needs a "
        "FlashInfer whose trtllm_bf16_moe has the output routing_replay_out; the "
        "installed one has none. Install the flashinfer-python that this vLLM "
        "requires, or start with another kernel, for example --moe-backend triton."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_capture_support(layer, NUM_LAYERS)


def test_model_of_other_kernels_keeps_the_wider_buffer(monkeypatch):
    layer = Layer(1, QuantMethod(make_kernel("bf16", monkeypatch)))
    layer.quant_method = SimpleNamespace(
        is_monolithic=False,
        topk_indices_dtype=None,
        experts_cls=TritonExperts,
    )
    assert bind(layer).dtype == torch.int32


@pytest.mark.parametrize(
    ("backend", "experts_cls", "captures"),
    [
        (UnquantizedMoeBackend.CPU, None, True),
        (UnquantizedMoeBackend.FLASHINFER_TRTLLM, TrtLlmBf16Experts, True),
        (UnquantizedMoeBackend.TRITON, TritonExperts, False),
    ],
)
def test_unquantized_method_knows_which_kernels_hand_out_their_choice(
    backend: UnquantizedMoeBackend, experts_cls: type | None, captures: bool
):
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    method.unquantized_backend, method.experts_cls = backend, experts_cls
    assert method.captures_routed_experts is captures


@pytest.mark.parametrize(
    ("dp_size", "enable_eplb"), [(1, False), (2, False), (1, True), (2, True)]
)
def test_ids_of_all_ranks_or_of_physical_experts_are_refused(
    calls, kernel: FusedMoEKernel, dp_size: int, enable_eplb: bool
):
    layer = Layer(1, QuantMethod(kernel, dp_size=dp_size), enable_eplb)
    if dp_size == 1 and not enable_eplb:
        check_capture_support(layer, NUM_LAYERS)
        return
    name = type(kernel.fused_experts).__name__
    message = (
        f"--enable-return-routed-experts: the MoE kernel {name} writes the choices "
        "of all data-parallel ranks, and physical experts under EPLB. Start with "
        "another kernel, for example --moe-backend triton."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_capture_support(layer, NUM_LAYERS)
