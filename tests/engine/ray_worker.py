"""A CPU worker for Ray's compiled graph, which asks every worker for its device."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class RayCPUWorker(CPUWorker):
    """CPUWorker that says it runs on the CPU."""

    def init_device(self) -> None:
        """Start as usual, and name the device."""
        super().init_device()
        self.device = torch.device("cpu")
