# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real offloading connectors, scheduler's and worker's side, around a `Runner`.

Only the copy between the tiers is made up, as it needs CUDA: it takes the rows that stand
for keys and values from the runner's KV cache when it ends, which is the latest that a copy
on a stream may read, and ends when it must or when chance will have it.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from scheduling import BLOCK_SIZE, Engine, Runner, make_engine
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.worker.worker import (
    OffloadingHandler,
    TransferResult,
    TransferSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

# Bytes of a block; any number will do.
PAGE = 64


@dataclass
class Copy:
    """One transfer that has not ended, until `end` is called."""

    number: int
    move: Callable[[], None]
    has_ended: bool = False

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.move()


class Copies:
    """Moves what the runner's KV cache holds to a tier and back."""

    def __init__(self, runner: Runner, seed: int) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.tier: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        self.num_stored_blocks = self.num_loaded_blocks = 0

    def ends_now(self) -> bool:
        return self.random.random() < 0.4

    def move(
        self, is_store: bool, gpu_blocks: Iterable[int], tier_blocks: Iterable[int]
    ) -> None:
        for gpu_block, tier_block in zip(gpu_blocks, tier_blocks, strict=True):
            for offset in range(BLOCK_SIZE):
                slot = int(gpu_block) * BLOCK_SIZE + offset
                place = int(tier_block), offset
                for group in range(len(self.runner.windows)):
                    if is_store:
                        held = self.tier.setdefault(place, {})
                        held.pop(group, None)
                        if (group, slot) in self.runner.kv_cache:
                            held[group] = self.runner.kv_cache[group, slot]
                    elif group in self.tier[place]:
                        self.runner.kv_cache[group, slot] = self.tier[place][group]
            if is_store:
                self.num_stored_blocks += 1
            else:
                self.num_loaded_blocks += 1


class JobCopies(Copies, OffloadingHandler):
    """Copies of the OffloadingConnector: jobs by number, both directions in order."""

    def __init__(self, runner: Runner, seed: int, factor: int) -> None:
        super().__init__(runner, seed)
        self.factor = factor
        self.jobs: deque[Copy] = deque()

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, target = spec
        is_store = isinstance(source, GPULoadStoreSpec)
        gpu, tier = (source, target) if is_store else (target, source)
        gpu_blocks, tier_blocks = self._pairs(gpu, tier.block_ids)
        self.jobs.append(
            Copy(job_id, lambda: self.move(is_store, gpu_blocks, tier_blocks))
        )
        return True

    def _pairs(
        self, gpu: GPULoadStoreSpec, tier_blocks: np.ndarray
    ) -> tuple[list[int], list[int]]:
        parts = [
            int(b) * self.factor + i for b in tier_blocks for i in range(self.factor)
        ]
        paired: list[int] = []
        at = 0
        for size, index in zip(gpu.group_sizes, gpu.block_indices, strict=True):
            if size:
                skipped = index % self.factor
                paired += parts[at + skipped : at + skipped + size]
                at += -(-(skipped + size) // self.factor) * self.factor
        assert at == len(parts)
        return gpu.block_ids.tolist(), paired

    def get_finished(self) -> list[TransferResult]:
        while self.jobs and (self.jobs[0].has_ended or self.ends_now()):
            self.jobs[0].end()
            yield TransferResult(self.jobs.popleft().number, True)

    def wait(self, job_ids: set[int]) -> None:
        last = max(
            (i for i, c in enumerate(self.jobs) if c.number in job_ids), default=-1
        )
        for copy in list(self.jobs)[: last + 1]:
            copy.end()


class EventCopies(Copies):
    """Copies of the SimpleCPUOffloadConnector, each with an event to ask."""

    def launch_copy(
        self, source, target, is_store, event_idx, events_list, after
    ) -> None:
        gpu, tier = (source, target) if is_store else (target, source)
        gpu, tier = list(gpu), list(tier)
        copy = Copy(event_idx, lambda: self.move(is_store, gpu, tier))
        events_list.append((event_idx, Event(copy, self.ends_now)))


@dataclass
class Event:
    copy: Copy
    ends_now: Callable[[], bool]

    def query(self) -> bool:
        if not self.copy.has_ended and self.ends_now():
            self.copy.end()
        return self.copy.has_ended

    def synchronize(self) -> None:
        self.copy.end()


class OffloadingEngine(Engine):
    """An engine whose worker has the worker's side of a connector."""

    def __init__(self, engine: Engine, worker, copies: Copies) -> None:
        self.__dict__.update(engine.__dict__)
        self.worker, self.copies = worker, copies
        self._run_model = self.runner.execute
        self.runner.execute = self._execute

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """What a model runner does around its forward pass."""
        metadata = scheduled.kv_connector_metadata
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        output = self._run_model(scheduled)
        self.worker.wait_for_save()
        sending, receiving = self.worker.get_finished(scheduled.finished_req_ids)
        output.kv_connector_output = KVConnectorOutput(
            finished_sending=sending,
            finished_recving=receiving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        return output

    def settle(self) -> None:
        """Run steps without requests until no transfer is on the way."""
        for _ in range(60):
            self.launch()
            self.drain()


def make_offloading_engine(
    model: str,
    num_blocks: int,
    num_tier_blocks: int,
    *,
    connector: str = "OffloadingConnector",
    factor: int = 1,
    seed: int = 0,
    extra: dict | None = None,
    **options,
) -> OffloadingEngine:
    """Build an engine with a tier of `num_tier_blocks` blocks, `factor` of the GPU's each."""
    tier_bytes = num_tier_blocks * factor * PAGE
    config = KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_extra_config={
            "cpu_bytes_to_use": tier_bytes,
            **({"block_size": factor * BLOCK_SIZE} if factor > 1 else {}),
            **(extra or {}),
        },
    )
    engine = make_engine(
        model, num_blocks, kv_transfer_config=config, page=PAGE, **options
    )
    scheduler = engine.scheduler
    worker = KVConnectorFactory.create_connector(
        scheduler.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config
    )
    if connector == "OffloadingConnector":
        copies: Copies = JobCopies(engine.runner, seed, factor)
        handlers = worker.connector_worker.worker
        handlers.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, copies)
        handlers.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, copies)
    else:
        copies = EventCopies(engine.runner, seed)
        worker.worker_handler._backend = copies
    return OffloadingEngine(engine, worker, copies)
