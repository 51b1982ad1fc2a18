"""What the tests change of vLLM's CPU platform, in the process that configures an engine.

Importing vLLM takes ten times as long as all else that a tiny model's engine needs to start. The
stock CPU platform starts each worker in a new interpreter; here they are forked from a process
that has imported vLLM and, with one thread for each (OMP_NUM_THREADS=1), no thread pool.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# What every engine and server of the tests has in its environment.
ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default two ranks want two NUMA nodes
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextlib.contextmanager
def changed_platform(is_async: bool = False, data_parallel: bool = False) -> Iterator[None]:
    """Change the platform for the duration.

    Args:
        is_async: leave async scheduling on, which the stock platform switches off.
        data_parallel: add what the stock build lacks for data-parallel MoE models; see
            data_parallel_worker.py.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.__dict__["check_and_update_config"]

    def check_and_update_config(cls: type, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        if data_parallel and parallel.data_parallel_size > 1:
            parallel.worker_cls = "data_parallel_worker.DataParallelCPUWorker"
        stock.__func__(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if is_async:
            vllm_config.scheduler_config.async_scheduling = True
            parallel.worker_cls = "async_worker.AsyncCPUWorker"

    with contextlib.ExitStack() as stack:

        def change(owner: object, name: str, value: object) -> None:
            before = vars(owner)[name]
            setattr(owner, name, value)
            stack.callback(setattr, owner, name, before)

        change(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
        # a new interpreter for each class of models, to keep CUDA out of this process
        change(registry, "_run_in_subprocess", lambda call: call())
        if data_parallel:
            # the stock one would bind rank 1 to the memory of NUMA node 1
            change(CpuPlatform, "device_control_env_var", "R3_DATA_PARALLEL_DEVICES")
            name = "data_parallel_worker.Communicator"
            change(CpuPlatform, "get_device_communicator_cls", classmethod(lambda cls: name))
        yield
