"""A CPU worker that runs the model runner's asynchronous path.

The CPU build never runs it, so it lacks stand-ins for the streams and events of that path.
On the CPU a copy is finished when the call returns: waiting has nothing to do.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class Nothing:
    """A stream or an event: every method exists and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class AsyncCPUWorker(CPUWorker):
    """CPUWorker with streams and events that do nothing."""

    def init_device(self) -> None:
        """Put the stand-ins in place for this process, then start as usual."""
        torch.Event = torch.cuda.Event = torch.cuda.Stream = Nothing  # type: ignore[misc]
        torch.cuda.current_stream = lambda *args: Nothing()  # type: ignore[assignment]
        torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
        super().init_device()
        assert self.model_runner.use_async_scheduling
        self.model_runner.async_output_copy_stream = Nothing()
