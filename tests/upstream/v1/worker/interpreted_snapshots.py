# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The GPU path of the recorder on a CPU: its kernel is run by Triton's interpreter.

    python tests/upstream/v1/worker/interpreted_snapshots.py

A process of its own, started by test_snapshot_kernel.py with ENVIRONMENT. It prints a JSON object:
case -> what failed, empty if nothing did. A tensor of the CPU stands for pinned memory; the GPU's
view of it is the tensor itself, or a copy of it where the GPU does not reach the host's memory.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from test_routed_experts_recorder import (
    FULL,
    MAX_NUM_TOKENS,
    Group,
    build_recorder,
    expected_rows,
    make_ids,
    make_kv_cache_config,
    make_largest_ids,
    make_slots,
    run_layers,
)

import vllm.v1.worker.routed_experts as worker_routed_experts
from vllm.v1.worker.routed_experts import RoutedExpertsRecorder, RoutedExpertsSnapshot

# With no visible device vLLM leaves Triton on, although no driver is active.
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

DEPTH = 3  # of the ring


class Event:
    """Of a stream on which everything is done at once."""

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return self.is_recorded


def bound_recorder(
    view: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor, **options: Any
) -> RoutedExpertsRecorder:
    """A recorder of a GPU worker, warmed up; `view` is what the GPU sees of a tensor."""
    worker_routed_experts.get_accelerator_view_from_cpu_tensor = view
    recorder = build_recorder(setattr, device="cuda", **options)
    run_layers(recorder, make_ids(1))
    recorder.bind_kv_cache(make_kv_cache_config(FULL))
    return recorder


def check(
    snapshot: RoutedExpertsSnapshot | None, ids: torch.Tensor, slots: torch.Tensor
) -> None:
    """A snapshot has the rows of these ids, and these slots."""
    assert snapshot is not None
    step = snapshot.get()
    np.testing.assert_array_equal(step.rows, expected_rows(ids))
    assert step.slots.dtype == np.int64
    assert step.slots.tolist() == slots.tolist()


def rows_of_any_type() -> None:
    for num_experts, row_type in ((256, np.uint8), (257, np.int16)):
        for staging_dtype in (torch.int32, torch.int64):
            recorder = bound_recorder(
                num_experts=num_experts, staging_dtype=staging_dtype
            )
            for num_tokens in (1, 5, MAX_NUM_TOKENS):
                ids = make_largest_ids(num_tokens, num_experts)
                run_layers(recorder, ids)
                slots = make_slots(MAX_NUM_TOKENS)
                slots[0] = -1
                snapshot = recorder.snapshot(num_tokens, MAX_NUM_TOKENS, slots)
                check(snapshot, ids, slots[:num_tokens])
                assert snapshot is not None and snapshot.get().rows.dtype == row_type


def steps_in_flight() -> None:
    recorder = bound_recorder()
    for first in range(2 * DEPTH):
        found = []
        for number in range(first, first + DEPTH):
            num_tokens = 1 + number % MAX_NUM_TOKENS
            ids, slots = (
                make_ids(num_tokens, mark=number),
                number + make_slots(MAX_NUM_TOKENS),
            )
            run_layers(recorder, ids)
            snapshot = recorder.snapshot(num_tokens, MAX_NUM_TOKENS, slots)
            found.append((snapshot, ids, slots[:num_tokens]))
        for step in found:
            check(*step)


def gathered_rows() -> None:
    ids = make_ids(6)
    others = [torch.tensor(expected_rows(ids[:, 3:]), dtype=torch.int32)]
    recorder = bound_recorder(group=Group(0, others), is_sequence_parallel=True)
    run_layers(recorder, ids[:, :3])
    slots = make_slots(MAX_NUM_TOKENS)
    snapshot = recorder.snapshot(5, 6, slots)
    recorder.staging.fill_(0)
    check(snapshot, ids[:, :5], slots[:5])


def only_a_reachable_ring_is_kept() -> None:
    assert len(bound_recorder()._ring) == DEPTH
    recorder = bound_recorder(view=torch.clone)
    assert recorder._ring == []
    ids, slots = make_ids(4, mark=2), make_slots(MAX_NUM_TOKENS)
    run_layers(recorder, ids)
    snapshot = recorder.snapshot(4, 8, slots)
    run_layers(recorder, make_ids(4, mark=3))
    check(snapshot, ids, slots[:4])


def a_ring_bound_again_is_tried_again() -> None:
    recorder = bound_recorder()
    for host in recorder._ring:
        host.slots_on_gpu = host.slots_on_gpu.clone()
        host.slots.fill(-1)  # left behind by an earlier step
    recorder.bind_kv_cache(make_kv_cache_config(FULL))
    assert recorder._ring == []


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
    worker_routed_experts.is_uva_available = lambda: True
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
