"""A worker whose ranks share one GPU, so that tensor, expert and data parallel run on any host.

`--worker-cls tests.gpu.shared_gpu.SharedGpuWorker --distributed-executor-backend mp` puts
every rank on GPU 0. The collectives are NCCL's own, which allows several ranks of a GPU from
2.30 on: `ENVIRONMENT` asks for it, and an older NCCL that torch brought must give way by
LD_PRELOAD and VLLM_NCCL_SO_PATH. Ranks wait for each other in time slices: right, but slow.
"""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu_worker import Worker

ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
ARGUMENTS = dict(
    worker_cls="tests.gpu.shared_gpu.SharedGpuWorker",
    distributed_executor_backend="mp",
    disable_custom_all_reduce=True,
)


class _AlwaysZero(int):
    """A local rank that stays 0 whatever the data-parallel rank adds to it."""

    def __add__(self, other: int) -> _AlwaysZero:
        return self


class SharedGpuWorker(Worker):
    """vLLM's GPU worker, on GPU 0 whatever its rank."""

    def init_device(self) -> None:
        self.local_rank = _AlwaysZero(0)
        count = torch.accelerator.device_count
        torch.accelerator.device_count = lambda: 64
        try:
            super().init_device()
        finally:
            torch.accelerator.device_count = count
