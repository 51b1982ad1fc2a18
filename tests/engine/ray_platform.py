"""A platform plugin that lets Ray's workers run vLLM's CPU build.

0.21.0 names no Ray resource for a CPU, so it refuses Ray there. This platform takes the "GPUs"
that a test's Ray was told of, and fills in what the stock CPU worker lacks for the executors.
test_ray.py puts it on PYTHONPATH with an entry point of `vllm.platform_plugins`, so that every
process finds it; a plugin wins over the built-in platforms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def register() -> str:
    """Name the platform to vLLM."""
    return "ray_platform.RayCpuPlatform"


class RayCpuPlatform(CpuPlatform):
    """The CPU platform, one Ray GPU a rank, with the scheduling that vLLM chose."""

    ray_device_key = "GPU"
    # the stock one would bind rank 1 to the memory of NUMA node 1
    device_control_env_var = "R3_RAY_DEVICES"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Keep async scheduling as it is for the executor; the stock platform turns it off."""
        is_async = vllm_config.scheduler_config.async_scheduling
        worker = "async_worker.AsyncCPUWorker" if is_async else "ray_worker.RayCPUWorker"
        vllm_config.parallel_config.worker_cls = worker
        super().check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async
