# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The GPU path of the recorder on a CPU: its kernel is run by Triton's interpreter.

`python -m tests.engine.core.interpreted_snapshots` prints a JSON object: case -> what failed, empty
if nothing did. Needs the environment that ENVIRONMENT gives, before Triton is imported. A tensor of
the CPU stands for pinned memory; the GPU's view of it is the tensor itself, or a copy of it where
the GPU does not reach the host's memory.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

import numpy as np
import torch
import vllm.v1.worker.routed_experts as worker_routed_experts
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.routed_experts import RoutedExpertsInfo
from vllm.v1.worker.routed_experts import RoutedExpertsRecorder

# With no visible device vLLM leaves Triton on, although no driver is active.
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

NUM_LAYERS, MOE_LAYERS, MAX_TOKENS, TOP_K, DEPTH = 5, [1, 2, 4], 12, 3, 3


class Event:
    """Of a stream on which everything is done at once."""

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return self.is_recorded


def new_recorder(
    num_experts: int = 256,
    staging_dtype: torch.dtype = torch.int32,
    view: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> RoutedExpertsRecorder:
    """A recorder of a GPU worker, without a model behind it."""
    recorder = RoutedExpertsRecorder.__new__(RoutedExpertsRecorder)
    recorder.info = RoutedExpertsInfo(NUM_LAYERS, MOE_LAYERS, num_experts, TOP_K)
    recorder.device = torch.device("cuda")
    recorder.staging = torch.zeros(NUM_LAYERS, MAX_TOKENS, TOP_K, dtype=staging_dtype)
    recorder.is_sequence_parallel, recorder.is_output_rank = False, True
    recorder._dtype, recorder._step = getattr(torch, recorder.info.dtype), 0
    worker_routed_experts.get_accelerator_view_from_cpu_tensor = view
    recorder._make_ring(MAX_TOKENS, DEPTH)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    recorder.bind_kv_cache(KVCacheConfig(8, [], [KVCacheGroupSpec(["0"], spec)]))
    return recorder


def run_layers(recorder: RoutedExpertsRecorder, num_tokens: int, seed: int) -> np.ndarray:
    """What the MoE layers of a forward pass leave behind; returns the rows to be expected."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(MOE_LAYERS), num_tokens, TOP_K
    ids = torch.randint(0, recorder.info.num_experts, shape, generator=generator)
    recorder.staging[MOE_LAYERS, :num_tokens] = ids.to(recorder.staging.dtype)
    rows = np.zeros((num_tokens, NUM_LAYERS, TOP_K), dtype=recorder.info.dtype)
    rows[:, MOE_LAYERS] = ids.numpy().transpose(1, 0, 2)
    return rows


def rows_of_any_type() -> None:
    for num_experts in (256, 257):
        for dtype in (torch.int16, torch.int32, torch.int64):
            recorder = new_recorder(num_experts, dtype)
            for num_tokens in (1, 5, MAX_TOKENS):
                expected = run_layers(recorder, num_tokens, seed=num_tokens)
                slots = 100 + 7 * torch.arange(MAX_TOKENS)
                slots[0] = -1
                step = recorder.snapshot(num_tokens, MAX_TOKENS, slots).get()
                assert step.rows.dtype == expected.dtype
                np.testing.assert_array_equal(step.rows, expected)
                assert step.slots.dtype == np.int64
                assert step.slots.tolist() == slots[:num_tokens].tolist()


def steps_in_flight() -> None:
    recorder = new_recorder()
    for first in range(2 * DEPTH):
        expected, found = [], []
        for number in range(first, first + DEPTH):
            num_tokens = 1 + number % MAX_TOKENS
            expected.append(run_layers(recorder, num_tokens, seed=number))
            slots = number + torch.arange(MAX_TOKENS)
            found.append(recorder.snapshot(num_tokens, MAX_TOKENS, slots))
        for number, (rows, snapshot) in enumerate(zip(expected, found, strict=True)):
            np.testing.assert_array_equal(snapshot.get().rows, rows)
            assert snapshot.get().slots[0] == first + number


def gathered_rows() -> None:
    recorder = new_recorder()
    expected = run_layers(recorder, 6, seed=1)
    rows = recorder.staging[:, :6].transpose(0, 1).to(torch.uint8)
    recorder.staging.fill_(0)
    step = recorder._snapshot_on_gpu(6, torch.arange(50, 50 + MAX_TOKENS), rows).get()
    np.testing.assert_array_equal(step.rows, expected)
    assert step.slots.tolist() == list(range(50, 56))


def only_a_reachable_ring_is_kept() -> None:
    assert len(new_recorder()._ring) == DEPTH
    recorder = new_recorder(view=torch.clone)
    assert recorder._ring == []
    expected = run_layers(recorder, 4, seed=2)
    snapshot = recorder.snapshot(4, 8, torch.arange(9, 9 + MAX_TOKENS))
    run_layers(recorder, 4, seed=3)
    np.testing.assert_array_equal(snapshot.get().rows, expected)
    assert snapshot.get().slots.tolist() == [9, 10, 11, 12]


def a_ring_bound_again_is_tried_again() -> None:
    recorder = new_recorder()
    kept = recorder._ring
    for host in kept:
        host.slots_on_gpu = host.slots_on_gpu.clone()
        host.slots.fill(-1)  # left behind by an earlier step
    assert not recorder._gpu_reaches_host()
    assert len(kept) == DEPTH


CASES = [
    rows_of_any_type,
    steps_in_flight,
    gathered_rows,
    only_a_reachable_ring_is_kept,
    a_ring_bound_again_is_tried_again,
]


def main() -> int:
    torch.cuda.Event = Event  # type: ignore[misc]
    empty = torch.empty
    torch.empty = lambda *shape, pin_memory=False, **kwargs: empty(*shape, **kwargs)
    outcomes = {}
    for case in CASES:
        try:
            case()
            outcomes[case.__name__] = ""
        except Exception:
            outcomes[case.__name__] = traceback.format_exc()
    print(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
