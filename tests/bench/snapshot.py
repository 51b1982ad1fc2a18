"""What a step's snapshot of routed experts costs the host and the GPU, and what others would.

`python -m tests.bench.snapshot --out DIR` times the calls of vLLM's model runner on a GPU,
without a model: microseconds of the calling thread and of the main stream for a step of N tokens,
and of the thread that fetches the rows. Ways to bring the rows to the host:

- `recorder`: the patched vLLM as it is: the kernel writes into pinned memory, no copy at all.
- `copied`: the kernel writes into device memory, a copy on a stream of its own brings that over.
- `direct`: as `recorder`, the compiled kernel launched without Triton's look at the arguments.

Each way must give the rows that the staging buffer holds. Medians go into DIR/snapshot.json and
a small table on stdout. `tests.bench.engine` runs whole engines with the workers below.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.routed_experts import RoutedExpertsInfo
from vllm.v1.worker import routed_experts
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.routed_experts import RoutedExpertsRecorder, RoutedExpertsSnapshot

NUM_EXPERTS, TOP_K, MAX_TOKENS = 128, 8, 8192


class Copied(RoutedExpertsRecorder):
    """Takes the way over device memory and a copy stream."""

    def _make_ring(self, max_num_tokens: int, depth: int) -> None:
        super()._make_ring(max_num_tokens, depth)
        self._offset = 8 * max_num_tokens
        num_bytes = self._offset + self._ring[0].rows.nbytes
        self._device_ring = [
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(depth)
        ]
        self._pinned = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(depth)
        ]
        self._copy_stream = torch.cuda.Stream(self.device)

    def _snapshot_on_gpu(
        self, num_tokens: int, slot_mapping: torch.Tensor, rows: torch.Tensor | None
    ) -> RoutedExpertsSnapshot:
        index = self._step % len(self._ring)
        self._step += 1
        # slots end where rows begin, so that one copy brings both
        offset = self._offset - 8 * num_tokens
        row_bytes = self._ring[0].rows[0].nbytes
        device = self._device_ring[index][offset : self._offset + num_tokens * row_bytes]
        routed_experts._snapshot_kernel[(num_tokens,)](
            self.staging,
            slot_mapping,
            device[: 8 * num_tokens].view(torch.int64),
            device[8 * num_tokens :].view(self._dtype),
            **self._kernel_args,
        )
        host = self._pinned[index][: len(device)]
        event = self._ring[index].event
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            host.copy_(device, non_blocking=True)
            event.record()
        data = host.numpy()
        rows_of_step = data[8 * num_tokens :].view(self.info.dtype)
        return RoutedExpertsSnapshot(
            data[: 8 * num_tokens].view(np.int64),
            rows_of_step.reshape(num_tokens, *self.info.row_shape),
            event,
        )


class Direct(RoutedExpertsRecorder):
    """Launches the compiled kernel."""

    def _snapshot_on_gpu(
        self, num_tokens: int, slot_mapping: torch.Tensor, rows: torch.Tensor | None
    ) -> RoutedExpertsSnapshot:
        host = self._ring[self._step % len(self._ring)]
        args = self.staging, slot_mapping, host.slots_on_gpu, host.rows_on_gpu
        if self._step == 0:
            self._kernel = routed_experts._snapshot_kernel[(1,)](*args, **self._kernel_args)
        self._step += 1
        self._kernel[(num_tokens, 1, 1)](*args, *self._kernel_args.values())
        return host.snapshot(num_tokens)


class CopiedWorker(Worker):
    """A GPU worker whose rows come by `copied`."""

    recorder: type[RoutedExpertsRecorder] = Copied

    def load_model(self, **kwargs: Any) -> None:
        """Put the other recorder in place for this process, then load as usual."""
        routed_experts.RoutedExpertsRecorder = self.recorder  # type: ignore[misc]
        super().load_model(**kwargs)


class DirectWorker(CopiedWorker):
    """A GPU worker whose rows come by `direct`."""

    recorder = Direct


WAYS = {"recorder": RoutedExpertsRecorder, "copied": Copied, "direct": Direct}


def make_recorder(way: str, num_layers: int) -> RoutedExpertsRecorder:
    """A recorder of a GPU worker, without a model behind it."""
    recorder = WAYS[way].__new__(WAYS[way])
    layers = list(range(num_layers))
    recorder.info = RoutedExpertsInfo(num_layers, layers, NUM_EXPERTS, TOP_K)
    recorder.device = torch.device("cuda")
    shape = num_layers, MAX_TOKENS, TOP_K
    recorder.staging = torch.randint(
        0, NUM_EXPERTS, shape, dtype=torch.int32, device=recorder.device
    )
    recorder.is_sequence_parallel, recorder.is_output_rank = False, True
    recorder._dtype, recorder._step = torch.uint8, 0
    recorder._make_ring(MAX_TOKENS, depth=3)
    return recorder


def measure(recorder: RoutedExpertsRecorder, num_tokens: int, repeats: int) -> dict[str, float]:
    """Medians in microseconds; raises ValueError for wrong rows."""
    slots = torch.arange(MAX_TOKENS, device=recorder.device)
    expected = recorder.staging[:, :num_tokens].transpose(0, 1).cpu().numpy()
    found: dict[str, list[float]] = dict(launch_us=[], get_us=[], gpu_us=[])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    busy = torch.zeros(2**27, device=recorder.device)
    for turn in range(repeats):
        busy.add_(1)  # the host is ahead of the GPU, as with async scheduling
        begin.record()
        start = time.perf_counter()
        snapshot = recorder.snapshot(num_tokens, num_tokens, slots)
        launched = time.perf_counter()
        end.record()
        torch.cuda.synchronize()
        fetching = time.perf_counter()
        step = snapshot.get()
        fetched = time.perf_counter()
        if turn < 5:
            if not np.array_equal(step.rows, expected) or step.slots[-1] != num_tokens - 1:
                raise ValueError(f"wrong rows of {num_tokens} tokens")
            continue
        found["launch_us"].append((launched - start) * 1e6)
        found["get_us"].append((fetched - fetching) * 1e6)
        found["gpu_us"].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {}
    for way in WAYS:
        recorder = make_recorder(way, args.layers)
        for num_tokens in (1, 32, 256, 8192):
            result = measure(recorder, num_tokens, args.repeats)
            report[f"{way}/{num_tokens}"] = result
            cells = "  ".join(f"{name} {value:8.1f}" for name, value in result.items())
            print(f"{way:12} {num_tokens:5} tokens  {cells}", flush=True)
    (args.out / "snapshot.json").write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
