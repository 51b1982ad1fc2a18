"""The worker of `tests.gpu.lifecycle`: takes turns on the GPU, says what is bound, reloads on V2.

vLLM's sleep refuses when less memory is free afterwards than before, by whomever it was taken:
engines of several gigabytes that share a GPU must take and give memory one at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

LOCK = "R3_LIVES_LOCK"


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Wait for the file lock that all engines of a run share."""
    with open(os.environ[LOCK], "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _bound(model: Any) -> tuple[int, int]:
    """MoE layers of a model, and how many of them have a capture bound."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE

    layers = [m for m in model.modules() if isinstance(m, FusedMoE)]
    return len(layers), sum(layer.router.capture_fn is not None for layer in layers)


class LivesWorker(Worker):
    """vLLM's GPU worker with a lock around what moves much memory, and a few questions."""

    freed_bytes = 0

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        with _turn():
            return super().initialize_from_config(*args, **kwargs)

    def sleep(self, level: int = 1) -> None:
        with _turn():
            before = torch.cuda.mem_get_info()[0]
            super().sleep(level)
            self.freed_bytes = torch.cuda.mem_get_info()[0] - before

    def wake_up(self, tags: list[str] | None = None) -> None:
        with _turn():
            super().wake_up(tags)

    def describe(self) -> dict[str, Any]:
        """What ran: runner, graphs, scheduling, and the captures of target and draft."""
        runner: Any = self.model_runner
        drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
        draft = getattr(drafter, "model", None)
        target_layers, target_bound = _bound(runner.get_model())
        draft_layers, draft_bound = _bound(draft) if draft is not None else (0, 0)
        config = self.vllm_config
        return dict(
            runner=type(runner).__module__,
            cudagraph_mode=str(config.compilation_config.cudagraph_mode),
            compilation_mode=str(config.compilation_config.mode),
            async_scheduling=bool(config.scheduler_config.async_scheduling),
            drafter=type(draft).__name__ if draft is not None else None,
            target_moe_layers=target_layers,
            target_captures=target_bound,
            draft_moe_layers=draft_layers,
            draft_captures=draft_bound,
            freed_bytes=int(self.freed_bytes),
        )

    def fingerprint(self) -> str:
        """One number for all weights of the target."""
        parameters = self.model_runner.get_model().parameters()
        return repr(sum(float(p.double().abs().sum()) for p in parameters))

    def reload_layerwise(self, path: str) -> None:
        """What `reload_weights` of the V1 runner does, for the V2 runner, which has none."""
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model: Any = self.model_runner.get_model()
        self.model_config.model = path
        loader: Any = get_model_loader(self.load_config)
        with torch.device(self.model_runner.device):
            initialize_layerwise_reload(model)
            model.load_weights(loader.get_all_weights(self.model_config, model))
            finalize_layerwise_reload(model, self.model_config)
        torch.cuda.synchronize()
