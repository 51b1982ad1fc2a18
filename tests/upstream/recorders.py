# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Recorders without a model, what MoE layers leave in them, and the rows to be expected."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import vllm.v1.worker.routed_experts as worker_routed_experts
from vllm.distributed.eplb.eplb_state import EplbLayerState
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import (
    ZeroExpertRouter,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.worker.routed_experts import RoutedExpertsRecorder

NUM_LAYERS = 5
MOE_LAYERS = [1, 2, 4]
TOP_K = 3
MAX_NUM_TOKENS = 12
MAX_MODEL_LEN = 64
ATTENTION = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**ATTENTION)


class Group:
    """A tensor-parallel group of which every rank holds what `others` says."""

    def __init__(self, rank: int = 0, others: list[torch.Tensor] | None = None):
        self.is_first_rank = rank == 0
        self.rank_in_group = rank
        self.others = others
        self.world_size = 1 if others is None else 1 + len(others)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        parts = list(self.others or [])
        parts.insert(self.rank_in_group, tensor)
        return torch.cat(parts, dim)


def make_zero_expert_router(bias: torch.Tensor) -> ZeroExpertRouter:
    return ZeroExpertRouter(
        TOP_K,
        len(bias),
        EplbLayerState(),
        e_score_correction_bias=bias,
        num_logical_experts=len(bias) - 1,
        zero_expert_type="identity",
    )


def make_layer(number: int, num_experts: int, bias: torch.Tensor | None, **moe_config):
    return SimpleNamespace(
        layer_id=number,
        logical_num_experts=num_experts,
        router=SimpleNamespace() if bias is None else make_zero_expert_router(bias),
        moe_config=SimpleNamespace(**({"is_sequence_parallel": False} | moe_config)),
    )


def build_recorder(
    set_attribute: Callable[[Any, str, Any], Any],
    *,
    num_experts: int = 200,
    bias: torch.Tensor | None = None,
    group: Group | None = None,
    executor: str = "mp",
    max_capture_size: int | None = None,
    tensor_parallel_size: int = 1,
    staging_dtype: torch.dtype = torch.int32,
    device: str = "cpu",
    **moe_config,
) -> RoutedExpertsRecorder:
    """Build a recorder around a staging buffer of the CPU, without a model.

    `set_attribute` puts in place what a worker would have made: `setattr`, or a monkeypatch's.
    """

    def bind(model, num_layers, max_num_tokens, device):
        staging = torch.full(
            (num_layers, max_num_tokens, TOP_K), -1, dtype=staging_dtype
        )
        dense = [n for n in range(num_layers) if n not in MOE_LAYERS]
        staging[dense] = 0
        layers = [make_layer(n, num_experts, bias, **moe_config) for n in MOE_LAYERS]
        return staging, layers

    group = group or Group()
    set_attribute(worker_routed_experts, "bind_routed_experts", bind)
    set_attribute(worker_routed_experts, "get_tp_group", lambda: group)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_hidden_layers=lambda: NUM_LAYERS, max_model_len=MAX_MODEL_LEN
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_NUM_TOKENS),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=max_capture_size),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor_parallel_size,
            distributed_executor_backend=executor,
        ),
    )
    return RoutedExpertsRecorder(vllm_config, torch.nn.Module(), torch.device(device))


def make_ids(num_tokens: int, mark: int = 0) -> torch.Tensor:
    """Ids by layer and token: they depend on layer, token and column."""
    layer = torch.tensor(MOE_LAYERS)[:, None, None]
    token = torch.arange(num_tokens)[None, :, None]
    return 40 * layer + 3 * token + torch.arange(TOP_K) + mark


def run_layers(recorder: RoutedExpertsRecorder, ids: torch.Tensor) -> None:
    """What the MoE layers of a forward pass leave behind."""
    recorder.staging[MOE_LAYERS, : ids.shape[1]] = ids.to(recorder.staging.dtype)


def expected_rows(ids: torch.Tensor) -> np.ndarray:
    rows = np.zeros((ids.shape[1], NUM_LAYERS, TOP_K), dtype=np.int64)
    rows[:, MOE_LAYERS] = ids.numpy().transpose(1, 0, 2)
    return rows


def make_slots(num_tokens: int) -> torch.Tensor:
    return 100 + 7 * torch.arange(num_tokens)


def make_kv_cache_config(*specs) -> KVCacheConfig:
    return KVCacheConfig(
        8, [], [KVCacheGroupSpec([f"{i}"], s) for i, s in enumerate(specs)]
    )
