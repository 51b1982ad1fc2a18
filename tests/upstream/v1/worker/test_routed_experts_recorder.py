# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rows of one step, from the staging buffer to arrays of the wire type."""

import numpy as np
import pytest
import torch

from vllm.v1.routed_experts import RoutedExpertsInfo
from vllm.v1.worker.routed_experts import RoutedExpertsRecorder

NUM_LAYERS, MAX_TOKENS, TOP_K = 3, 16, 2


def make_recorder(
    num_experts: int,
    is_output_rank: bool = True,
    staging_dtype: torch.dtype = torch.int32,
):
    """A recorder of a CPU worker, without a model behind it."""
    recorder = RoutedExpertsRecorder.__new__(RoutedExpertsRecorder)
    recorder.info = RoutedExpertsInfo(NUM_LAYERS, [0, 2], num_experts, TOP_K)
    recorder.staging = torch.arange(
        NUM_LAYERS * MAX_TOKENS * TOP_K, dtype=staging_dtype
    )
    recorder.staging = recorder.staging.view(NUM_LAYERS, MAX_TOKENS, TOP_K)
    recorder.device = torch.device("cpu")
    recorder.is_sequence_parallel = False
    recorder.is_output_rank = is_output_rank
    recorder._dtype = getattr(torch, recorder.info.dtype)
    recorder._ring = []
    return recorder


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (257, np.int16)])
@pytest.mark.parametrize("staging_dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [1, 3, MAX_TOKENS])
def test_rows_are_token_first_with_their_slots(
    num_experts: int, dtype: type, staging_dtype: torch.dtype, num_tokens: int
):
    recorder = make_recorder(num_experts, staging_dtype=staging_dtype)
    slots = torch.arange(100, 100 + MAX_TOKENS)
    slots[num_tokens - 1] = -1
    step = recorder.snapshot(num_tokens, MAX_TOKENS, slots).get()
    assert step.rows.dtype == dtype
    expected = recorder.staging.numpy().transpose(1, 0, 2)[:num_tokens]
    np.testing.assert_array_equal(step.rows, expected)
    assert step.slots.tolist() == [*range(100, 99 + num_tokens), -1]


def test_next_pass_does_not_change_the_snapshot():
    recorder = make_recorder(num_experts=256)
    snapshot = recorder.snapshot(2, 2, torch.tensor([0, 1]))
    expected = recorder.staging.numpy().transpose(1, 0, 2)[:2].copy()
    recorder.staging.fill_(0)
    np.testing.assert_array_equal(snapshot.get().rows, expected)


def test_rank_whose_output_nobody_reads_takes_no_snapshot():
    recorder = make_recorder(num_experts=256, is_output_rank=False)
    assert recorder.snapshot(2, 2, torch.tensor([0, 1])) is None
