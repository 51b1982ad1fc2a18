# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Experts that run one by one on the CPU need no vLLM configuration."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 8, 6


class Experts:
    """The linear layers of a MoE layer, one function an expert."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor):
        self.gate_up_linear = [partial(F.linear, weight=w) for w in w13]
        self.down_linear = [partial(F.linear, weight=w) for w in w2]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def swigluoai_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


@pytest.mark.parametrize(
    ("activation", "act_fn"),
    [
        (MoEActivation.SILU, silu_and_mul),
        (MoEActivation.GELU, gelu_and_mul),
        (MoEActivation.SWIGLUOAI, swigluoai_and_mul),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_forward_pass_without_configuration(
    activation: MoEActivation, act_fn, num_tokens: int
):
    assert get_current_vllm_config_or_none() is None
    torch.manual_seed(num_tokens)
    w13 = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    w2 = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE)
    layer = Experts(w13, w2)
    x = torch.randn(num_tokens, HIDDEN)
    weights, ids = torch.rand(num_tokens, NUM_EXPERTS).topk(TOP_K)
    output = torch.empty_like(x)
    cpu_fused_moe._CPU_MOE_LAYER_CACHE[id(layer)] = weakref.ref(layer)
    try:
        cpu_fused_moe.cpu_fused_moe_torch(
            id(layer), output, x, weights, ids, activation.value, NUM_EXPERTS
        )
    finally:
        del cpu_fused_moe._CPU_MOE_LAYER_CACHE[id(layer)]

    expected = torch.zeros_like(x)
    for token in range(num_tokens):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            hidden = act_fn(w13[expert] @ x[token])
            expected[token] += weight * (w2[expert] @ hidden)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
