"""Run the same requests through engines whose ranks are Ray actors, and save what came back.

    python tests/engine/ray_engines.py MODEL_DIR OUT_DIR

A process of its own, started by test_ray.py: vLLM settles on its platform once in a process. Needs
a Ray of two nodes with one GPU each (`tests.gpu.ray_head`) and the platform of ray_platform.py.
For each case OUT_DIR gets NAME.npz (tokens and rows) and NAME.json (what ran, and how).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from engines import CPU_ENV, DEFAULTS, environment, seeded_prompts

PROMPTS = seeded_prompts(81, [3, 15, 16, 17, 31, 32, 33, 64, 90, 100, 120, 130])
MAX_TOKENS = 24
# Long prompts come in chunks, and 40 blocks are too few for all requests at a time.
OPTIONS = dict(max_num_batched_tokens=64, num_gpu_blocks_override=40)


class Case(NamedTuple):
    """One engine: which executor, how many ranks, and where they and the engine core run."""

    executor: str
    ranks: int
    core_in_process: bool = True
    away: bool = False  # the only rank on the other node, whose answers come over TCP


CASES = {
    "v2": Case("RayExecutorV2", ranks=2, core_in_process=False),
    "v2-away": Case("RayExecutorV2", ranks=1, away=True),
    "v1": Case("RayDistributedExecutor", ranks=2),
}


class StepArrays:
    """Watches the arrays that steps bring, without keeping them."""

    def __init__(self, manager: Any) -> None:
        self.owners: list[weakref.ref[np.ndarray]] = []
        self.writeable: set[bool] = set()
        self._update = manager.update
        manager.update = self.update

    def update(self, requests: Any, scheduled: Any, output: Any) -> None:
        """Note the arrays of a step, then let the manager take them in."""
        for array in output.routed_experts or ():
            self.writeable.add(array.flags.writeable)
            while isinstance(array.base, np.ndarray):
                array = array.base
            self.owners.append(weakref.ref(array))  # a view would keep this one alive
        self._update(requests, scheduled, output)

    def describe(self) -> dict[str, Any]:
        """How many arrays came, how many are still held, whether they could be written to."""
        alive = sum(owner() is not None for owner in self.owners)
        return dict(
            step_arrays=len(self.owners), alive=alive, step_writeable=sorted(self.writeable)
        )


def start(model: str, case: Case) -> Any:
    """Start one engine."""
    from vllm import LLM, envs

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not case.core_in_process))
    os.environ["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = str(int(case.executor == "RayExecutorV2"))
    envs.disable_envs_cache()
    ray = dict(distributed_executor_backend="ray", tensor_parallel_size=case.ranks)
    return LLM(model, **(DEFAULTS | OPTIONS | ray))


def ask(llm: Any) -> dict[str, np.ndarray]:
    """Run all requests, cold and then warm; tokens and rows by turn and request."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    saved: dict[str, np.ndarray] = {}
    for turn in range(2):
        # backwards the second time, so that what was used last is found in the cache
        order = list(range(len(PROMPTS)))[:: 1 - 2 * turn]
        inputs = [{"prompt_token_ids": PROMPTS[i]} for i in order]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        for i, output in zip(order, outputs, strict=True):
            (choice,) = output.outputs
            saved[f"tokens{turn}_{i}"] = np.array([*output.prompt_token_ids, *choice.token_ids])
            saved[f"cached{turn}_{i}"] = np.array(output.num_cached_tokens)
            saved[f"prompt{turn}_{i}"] = output.prompt_routed_experts.copy()
            saved[f"rows{turn}_{i}"] = choice.routed_experts.copy()
            # A caller may write into its rows: the warm turn must not find them in the cache.
            output.prompt_routed_experts.fill(99)
            choice.routed_experts.fill(99)
    return saved


def watch(llm: Any, case: Case) -> StepArrays | None:
    """Look at the arrays of steps, where the engine core is at hand."""
    if not case.core_in_process:
        return None
    return StepArrays(llm.llm_engine.engine_core.engine_core.scheduler.routed_experts_manager)


def describe(llm: Any, watched: StepArrays | None) -> dict[str, Any]:
    """What can be seen of a running engine."""
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    preemptions = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    facts = dict(async_scheduling=scheduler.async_scheduling, preemptions=preemptions)
    if watched is None:
        return facts
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    facts |= dict(executor=type(executor).__name__, away=ranks_away(executor))
    return facts | watched.describe()


def ranks_away(executor: Any) -> list[bool]:
    """For each rank, whether it runs on another node than this process."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    if hasattr(executor, "ray_worker_handles"):
        return [handle.node_id != here for handle in executor.ray_worker_handles]
    asked = ray.get([worker.get_node_and_gpu_ids.remote() for worker in executor.workers])
    return [node != here for node, _ in asked]


@contextlib.contextmanager
def own_gpu_taken(take: bool) -> Iterator[None]:
    """Leave no GPU free on this process's node, so that a rank must run on the other one."""
    if not take:
        yield
        return
    import ray
    from ray.util import placement_group, remove_placement_group

    ray.init()
    own_node = f"node:{os.environ['VLLM_HOST_IP']}"
    group = placement_group([{"GPU": 1, own_node: 0.001}])
    ray.get(group.ready())
    yield
    remove_placement_group(group)


def run(model: str, out: Path, name: str) -> None:
    """Run one case and save it."""
    case = CASES[name]
    with own_gpu_taken(case.away):
        begin = time.monotonic()
        llm = start(model, case)
        start_s = time.monotonic() - begin
        watched = watch(llm, case)
        np.savez(out / f"{name}.npz", **ask(llm))
        facts = describe(llm, watched) | dict(start_s=start_s)
        (out / f"{name}.json").write_text(json.dumps(facts))
        print(f"{name}: {facts}", flush=True)
        llm.llm_engine.engine_core.shutdown()
    if case.core_in_process:
        import ray

        ray.shutdown()  # vLLM leaves its placement group, and so the GPUs, until then


def main(model: str, out: str) -> None:
    """Run all cases."""
    with environment(**CPU_ENV):
        from vllm.platforms import current_platform

        assert current_platform.ray_device_key == "GPU", "ray_platform.py is not in use"
        for name in CASES:
            run(model, Path(out), name)


if __name__ == "__main__":
    main(*sys.argv[1:])
