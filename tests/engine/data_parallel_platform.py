"""A platform plugin that lets vLLM's CPU build run data-parallel mixture-of-experts models.

The stock build starts the ranks and makes the all2all manager, but then lacks what this manager
and expert parallelism need. This platform names a communicator and a worker that have it.
test_data_parallel.py puts it on PYTHONPATH with an entry point of `vllm.platform_plugins`, so that
every process finds it; a plugin wins over the built-in platforms.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def register() -> str:
    """Name the platform to vLLM."""
    return "data_parallel_platform.DataParallelCpuPlatform"


class DataParallelCpuPlatform(CpuPlatform):
    """The CPU platform with the communicator and the worker of data_parallel_worker.py."""

    # the stock one would bind rank 1 to the memory of NUMA node 1
    device_control_env_var = "R3_DATA_PARALLEL_DEVICES"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Name the communicator."""
        return "data_parallel_worker.Communicator"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Name the worker, and copy processes instead of importing everything in each again."""
        if vllm_config.parallel_config.data_parallel_size > 1:
            vllm_config.parallel_config.worker_cls = "data_parallel_worker.DataParallelCPUWorker"
        super().check_and_update_config(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
