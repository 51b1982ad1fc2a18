"""Where the host's time of a decode step goes: microseconds of the engine's own calls.

Only calls of this process are seen. The CPU build's workers are always processes of their own.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from typing import Any

# What is timed: name in the report -> where it is in one vLLM or another. Nested calls count in
# both; those that a vLLM lacks are left out.
CALLS = {
    "step": [
        "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        "vllm.v1.engine.core:EngineCore.step",
    ],
    "schedule": ["vllm.v1.core.sched.scheduler:Scheduler.schedule"],
    "execute_model": [
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
    ],
    "snapshot": ["vllm.v1.worker.routed_experts:RoutedExpertsRecorder.snapshot"],
    "sample_tokens": [
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
    ],
    "get_output": [
        "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.get_output",
        "vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output",
    ],
    "get": ["vllm.v1.worker.routed_experts:RoutedExpertsSnapshot.get"],
    "update_from_output": ["vllm.v1.core.sched.scheduler:Scheduler.update_from_output"],
    "update": ["vllm.v1.core.routed_experts_manager:RoutedExpertsManager.update"],
    "take_rows": ["vllm.v1.core.routed_experts_manager:RoutedExpertsManager.take_rows"],
    "process_outputs": ["vllm.v1.engine.output_processor:OutputProcessor.process_outputs"],
}


class CallTimes:
    """Times the calls of an engine in this process, from its making on."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        for name, places in CALLS.items():
            for place in places:
                self._wrap(name, place)

    def _wrap(self, name: str, place: str) -> None:
        module_name, _, path = place.partition(":")
        class_name, _, method_name = path.partition(".")
        try:
            owner = getattr(importlib.import_module(module_name), class_name)
            method = owner.__dict__[method_name]
        except (ImportError, AttributeError, KeyError):
            return
        found = self.found.setdefault(name, [])

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                found.append((time.perf_counter() - begin) * 1e6)

        setattr(owner, method_name, timed)

    def clear(self) -> None:
        """Forget what was timed so far."""
        for times in self.found.values():
            times.clear()

    def per_step(self) -> dict[str, float]:
        """Median microseconds of one call of each, of all since `clear`."""
        return {name: statistics.median(times) for name, times in self.found.items() if times}

    def totals(self) -> dict[str, float]:
        """Seconds of all calls of each since `clear`."""
        return {name: sum(times) * 1e-6 for name, times in self.found.items() if times}
