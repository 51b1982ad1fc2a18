# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From the staging buffer to the rows of one step, on the CPU path of the recorder.

The GPU path, in interpreted_snapshots.py, is judged by the same helpers.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vllm.v1.worker.routed_experts as worker_routed_experts
from vllm.distributed.eplb.eplb_state import EplbLayerState
from vllm.model_executor.layers.fused_moe.routed_experts_stages import StageLayers
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import (
    ZeroExpertRouter,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
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
        top_k=TOP_K,
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
    moe_layers: list[int] = MOE_LAYERS,
    stages: list[StageLayers] | None = None,
    stage: int = 0,
    **moe_config,
) -> RoutedExpertsRecorder:
    """Build a recorder around a staging buffer of the CPU, without a model.

    `set_attribute` puts in place what a worker would have made: `setattr`, or that
    of a monkeypatch.
    """

    def bind(layers, row_shape, max_num_tokens, device):
        num_layers, top_k = row_shape
        shape = (num_layers, max_num_tokens, top_k)
        staging = torch.zeros(shape, dtype=staging_dtype)
        staging[moe_layers] = -1
        return staging

    layers = [make_layer(n, num_experts, bias, **moe_config) for n in moe_layers]
    group = group or Group()
    pp_group = SimpleNamespace(
        rank_in_group=stage, is_last_rank=stage == len(stages or [0]) - 1
    )
    set_attribute(worker_routed_experts, "find_moe_layers", lambda *args: layers)
    set_attribute(worker_routed_experts, "bind_routed_experts", bind)
    set_attribute(
        worker_routed_experts, "gather_from_stages", lambda own: stages or [own]
    )
    set_attribute(worker_routed_experts, "get_pp_group", lambda: pp_group)
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


@pytest.fixture
def make_recorder(monkeypatch: pytest.MonkeyPatch):
    """Build a recorder around a staging buffer without a model."""
    return functools.partial(build_recorder, monkeypatch.setattr)


def make_largest_ids(num_tokens: int, num_experts: int) -> torch.Tensor:
    """Ids up to the largest that there is."""
    ids = make_ids(num_tokens)
    return ids + num_experts - 1 - ids.max()


@pytest.mark.parametrize("num_tokens", [1, 5, MAX_NUM_TOKENS])
@pytest.mark.parametrize("staging_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_experts", "dtype"), [(256, "uint8"), (257, "int16")])
def test_rows_of_a_padded_step_are_by_token_and_layer_number_with_their_slots(
    make_recorder, num_tokens: int, staging_dtype, num_experts: int, dtype: str
):
    recorder = make_recorder(num_experts=num_experts, staging_dtype=staging_dtype)
    ids = make_largest_ids(num_tokens, num_experts)
    run_layers(recorder, ids)
    slots = make_slots(MAX_NUM_TOKENS)
    slots[0] = -1  # of a token without a slot
    step = recorder.snapshot(num_tokens, MAX_NUM_TOKENS, slots).get()
    assert step.rows.dtype == np.dtype(dtype)
    assert step.slots.dtype == np.int64
    assert step.slots.tolist() == slots[:num_tokens].tolist()
    np.testing.assert_array_equal(step.rows, expected_rows(ids))


def test_the_next_step_does_not_change_a_snapshot(make_recorder):
    recorder = make_recorder()
    slots = make_slots(4)
    run_layers(recorder, make_ids(4))
    first = recorder.snapshot(4, 4, slots)
    run_layers(recorder, make_ids(6, mark=50))
    slots.fill_(0)
    second = recorder.snapshot(6, 6, make_slots(6))
    np.testing.assert_array_equal(first.get().rows, expected_rows(make_ids(4)))
    assert first.get().slots.tolist() == make_slots(4).tolist()
    np.testing.assert_array_equal(
        second.get().rows, expected_rows(make_ids(6, mark=50))
    )


# Which rank answers.


@pytest.mark.parametrize(
    ("rank", "executor", "answers"),
    [(0, "mp", True), (1, "mp", False), (0, "external_launcher", True),
     (1, "external_launcher", True), (1, "ray", False)],
)  # fmt: skip
def test_the_rank_that_a_scheduler_listens_to_answers(
    make_recorder, rank, executor, answers
):
    recorder = make_recorder(group=Group(rank, [torch.zeros(0)]), executor=executor)
    run_layers(recorder, make_ids(2))
    snapshot = recorder.snapshot(2, 2, make_slots(2))
    assert (snapshot is not None) == answers


# Sequence parallelism: each rank has routed a chunk of the tokens.


@pytest.mark.parametrize(
    ("num_tokens", "num_padded"), [(8, 8), (7, 8), (6, 8), (5, 6), (1, 2)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_chunks_of_all_ranks_are_joined_in_the_order_of_the_tokens(
    make_recorder, num_tokens: int, num_padded: int, rank: int
):
    chunk = num_padded // 2
    ids = make_ids(num_padded)
    by_rank = [ids[:, :chunk], ids[:, chunk:]]
    others = [torch.tensor(expected_rows(by_rank[1 - rank]), dtype=torch.int32)]
    recorder = make_recorder(
        group=Group(rank, others),
        is_sequence_parallel=True,
        executor="external_launcher",
    )
    run_layers(recorder, by_rank[rank])
    step = recorder.snapshot(num_tokens, num_padded, make_slots(num_tokens)).get()
    np.testing.assert_array_equal(step.rows, expected_rows(ids[:, :num_tokens]))
    assert step.rows.dtype == np.uint8


def test_every_rank_takes_part_in_joining_the_chunks(make_recorder):
    group = Group(1, [torch.zeros(2, NUM_LAYERS, TOP_K, dtype=torch.int32)])
    gathered = []
    gather = group.all_gather
    group.all_gather = lambda *args, **kwargs: (
        gathered.append(1) or gather(*args, **kwargs)
    )
    recorder = make_recorder(group=group, is_sequence_parallel=True)
    run_layers(recorder, make_ids(2))
    assert recorder.snapshot(4, 4, make_slots(4)) is None
    assert gathered == [1]


# Size and description.


@pytest.mark.parametrize(
    ("max_capture_size", "tensor_parallel_size", "size"),
    [(None, 1, 12), (0, 1, 12), (8, 1, 12), (13, 1, 13), (None, 5, 15), (13, 2, 14)],
)
def test_the_staging_buffer_holds_the_largest_padded_step(
    make_recorder, max_capture_size, tensor_parallel_size, size
):
    recorder = make_recorder(
        max_capture_size=max_capture_size, tensor_parallel_size=tensor_parallel_size
    )
    assert recorder.staging.shape == (NUM_LAYERS, size, TOP_K)


def test_the_description_is_that_of_the_model(make_recorder):
    info = make_recorder(num_experts=128).info
    assert info.to_dict() == {
        "num_layers": NUM_LAYERS,
        "moe_layers": MOE_LAYERS,
        "num_experts": 128,
        "top_k": TOP_K,
        "dtype": "uint8",
    }


@pytest.mark.parametrize(("num_zero_experts", "dtype"), [(0, "uint8"), (1, "int16")])
def test_zero_experts_count_as_choices(
    make_recorder, num_zero_experts: int, dtype: str
):
    bias = torch.zeros(256 + num_zero_experts)
    info = make_recorder(num_experts=256, bias=bias).info
    assert info.num_experts == 256 + num_zero_experts
    assert info.dtype == dtype


# Binding the KV cache, after the warm-up pass.


SLIDING = SlidingWindowSpec(sliding_window=16, **ATTENTION)
AS_LONG_AS_A_REQUEST = SlidingWindowSpec(sliding_window=MAX_MODEL_LEN, **ATTENTION)
UNIFORM = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": FULL})
MLA = MLAAttentionSpec(**ATTENTION)


@pytest.mark.parametrize(
    ("specs", "group"),
    [
        ([FULL], 0),
        ([SLIDING, FULL], 1),
        ([SLIDING, SLIDING, MLA], 2),
        ([SLIDING, UNIFORM], 1),
        ([SLIDING, AS_LONG_AS_A_REQUEST], 1),
    ],
)
def test_slots_are_those_of_the_full_attention_group(make_recorder, specs, group: int):
    recorder = make_recorder()
    run_layers(recorder, make_ids(1))
    recorder.bind_kv_cache(make_kv_cache_config(*specs))
    assert recorder.kv_cache_group == group


def test_the_kv_cache_may_be_bound_twice(make_recorder):
    recorder = make_recorder()
    run_layers(recorder, make_ids(1))
    staging = recorder.staging.data_ptr()
    recorder.bind_kv_cache(make_kv_cache_config(FULL))
    recorder.bind_kv_cache(make_kv_cache_config(SLIDING, FULL))
    assert recorder.kv_cache_group == 1
    assert recorder.staging.data_ptr() == staging


def test_a_layer_that_the_warm_up_pass_did_not_capture_is_named(make_recorder):
    recorder = make_recorder()
    run_layers(recorder, make_ids(1))
    recorder.staging[2, 0, 1] = -1
    message = (
        r"^--enable-return-routed-experts: expected expert ids of every MoE layer "
        r"after the warm-up pass, found none of layers \[2\]; start with another "
        r"--moe-backend$"
    )
    with pytest.raises(RuntimeError, match=message):
        recorder.bind_kv_cache(make_kv_cache_config(FULL))
