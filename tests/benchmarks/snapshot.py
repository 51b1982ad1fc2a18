"""What a step's snapshot of routed experts costs the host and the GPU, and what others would.

`python -m tests.benchmarks.snapshot --out DIR` times the calls of vLLM's model runner on a GPU,
without a model: microseconds of the calling thread and of the main stream for a step of N tokens,
and of the thread that fetches the rows. Ways to bring the rows to the host:

- `recorder`: the patched vLLM as it is.
- `main-stream`: kernel and copy on the main stream, no stream or event switch.
- `mapped`: the kernel writes into pinned memory, no copy at all.

Each way must give the rows that the staging buffer holds. Medians go into DIR/snapshot.json and
a small table on stdout. `tests.benchmarks.engine` runs whole engines with the workers below.
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
from vllm.triton_utils import triton
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
from vllm.v1.routed_experts import RoutedExpertsInfo
from vllm.v1.worker import routed_experts
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.routed_experts import RoutedExpertsRecorder, RoutedExpertsSnapshot

NUM_EXPERTS, TOP_K, MAX_TOKENS = 128, 8, 8192


class MainStream(RoutedExpertsRecorder):
    """Copies on the stream that the model runs on."""

    def _launch(self, num_tokens: int, slot_mapping: torch.Tensor, out: torch.Tensor) -> int:
        offset = routed_experts._rows_offset(num_tokens)
        routed_experts._snapshot_kernel[(num_tokens,)](
            self.staging,
            slot_mapping,
            out[: 4 * num_tokens].view(torch.int32),
            out[offset:].view(self._dtype),
            self.staging.stride(0),
            ROW_SIZE=self._row_size,
            TOP_K=self.info.top_k,
            BLOCK_SIZE=triton.next_power_of_2(self._row_size),
        )
        return offset + num_tokens * self._row_size * self._dtype.itemsize

    def _snapshot_on_gpu(
        self, num_tokens: int, slot_mapping: torch.Tensor, rows: torch.Tensor | None
    ) -> RoutedExpertsSnapshot:
        index = self._step % len(self._events)
        self._step += 1
        num_bytes = self._launch(num_tokens, slot_mapping, self._device_ring[0])
        host = self._host_ring[index][:num_bytes]
        host.copy_(self._device_ring[0][:num_bytes], non_blocking=True)
        self._events[index].record()
        return RoutedExpertsSnapshot(host, num_tokens, self.info, self._events[index])


class Mapped(MainStream):
    """Lets the kernel write into the host's memory."""

    def _snapshot_on_gpu(
        self, num_tokens: int, slot_mapping: torch.Tensor, rows: torch.Tensor | None
    ) -> RoutedExpertsSnapshot:
        if self._step == 0:
            self._views = [get_accelerator_view_from_cpu_tensor(h) for h in self._host_ring]
        index = self._step % len(self._events)
        self._step += 1
        num_bytes = self._launch(num_tokens, slot_mapping, self._views[index])
        self._events[index].record()
        host = self._host_ring[index][:num_bytes]
        return RoutedExpertsSnapshot(host, num_tokens, self.info, self._events[index])


class MainStreamWorker(Worker):
    """A GPU worker whose rows come by `recorder`."""

    recorder: type[RoutedExpertsRecorder] = MainStream

    def load_model(self, **kwargs: Any) -> None:
        """Put the other recorder in place for this process, then load as usual."""
        routed_experts.RoutedExpertsRecorder = self.recorder  # type: ignore[misc]
        super().load_model(**kwargs)


class MappedWorker(MainStreamWorker):
    """The same, with the other way."""

    recorder = Mapped


WAYS = {"recorder": RoutedExpertsRecorder, "main-stream": MainStream, "mapped": Mapped}


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
    recorder._dtype, recorder._row_size = torch.uint8, num_layers * TOP_K
    recorder._step = 0
    recorder._allocate_ring(MAX_TOKENS, depth=3)
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
