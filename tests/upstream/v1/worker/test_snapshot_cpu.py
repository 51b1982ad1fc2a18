# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From the staging buffer to the rows of one step, on the CPU path of the recorder."""

import functools

import numpy as np
import pytest
import torch

from recorders import (
    ATTENTION,
    FULL,
    MAX_MODEL_LEN,
    MOE_LAYERS,
    NUM_LAYERS,
    TOP_K,
    Group,
    build_recorder,
    expected_rows,
    make_ids,
    make_kv_cache_config,
    make_slots,
    run_layers,
)
from vllm.v1.kv_cache_interface import (
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


@pytest.fixture
def make_recorder(monkeypatch: pytest.MonkeyPatch):
    """Build a recorder around a staging buffer without a model."""
    return functools.partial(build_recorder, monkeypatch.setattr)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 11, 12])
@pytest.mark.parametrize(("num_experts", "dtype"), [(256, "uint8"), (257, "int16")])
def test_a_step_s_rows_are_by_token_and_layer_number_with_their_slots(
    make_recorder, num_tokens: int, num_experts: int, dtype: str
):
    recorder = make_recorder(num_experts=num_experts)
    run_layers(recorder, make_ids(num_tokens))
    step = recorder.snapshot(num_tokens, num_tokens, make_slots(num_tokens)).get()
    assert step.rows.dtype == np.dtype(dtype)
    assert step.slots.dtype == np.int64
    assert step.slots.tolist() == make_slots(num_tokens).tolist()
    np.testing.assert_array_equal(step.rows, expected_rows(make_ids(num_tokens)))


@pytest.mark.parametrize(
    ("num_experts", "largest"), [(256, 255), (257, 256), (512, 511)]
)
def test_the_largest_id_survives_the_change_of_type(
    make_recorder, num_experts, largest
):
    recorder = make_recorder(num_experts=num_experts)
    run_layers(recorder, torch.full((3, 2, TOP_K), largest))
    step = recorder.snapshot(2, 2, make_slots(2)).get()
    assert (step.rows[:, MOE_LAYERS] == largest).all()


@pytest.mark.parametrize("staging_dtype", [torch.int16, torch.int32, torch.int64])
def test_rows_come_from_a_staging_buffer_of_any_type(make_recorder, staging_dtype):
    recorder = make_recorder(staging_dtype=staging_dtype)
    run_layers(recorder, make_ids(4))
    step = recorder.snapshot(4, 4, make_slots(4)).get()
    np.testing.assert_array_equal(step.rows, expected_rows(make_ids(4)))


def test_padding_is_not_in_the_rows(make_recorder):
    recorder = make_recorder()
    run_layers(recorder, make_ids(5))
    # The graph ran 8 tokens; rows 5 to 7 and the slots of the padding are -1.
    slots = torch.cat([make_slots(5), torch.full((3,), -1)])
    step = recorder.snapshot(5, 8, slots).get()
    assert step.rows.shape == (5, NUM_LAYERS, TOP_K)
    assert step.slots.tolist() == make_slots(5).tolist()
    assert 255 not in step.rows


def test_a_token_without_a_slot_keeps_minus_one(make_recorder):
    recorder = make_recorder()
    run_layers(recorder, make_ids(3))
    step = recorder.snapshot(3, 3, torch.tensor([4, -1, 6])).get()
    assert step.slots.tolist() == [4, -1, 6]


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


def test_dense_layers_are_zero(make_recorder):
    recorder = make_recorder()
    run_layers(recorder, make_ids(4))
    rows = recorder.snapshot(4, 4, make_slots(4)).get().rows
    assert (rows[:, [0, 3]] == 0).all()


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
        r"^--enable-return-routed-experts: expected expert ids of every MoE layer after the "
        r"warm-up pass, found none of layers \[2\]; start with another --moe-backend$"
    )
    with pytest.raises(RuntimeError, match=message):
        recorder.bind_kv_cache(make_kv_cache_config(FULL))
