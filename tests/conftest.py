"""Models, oracles and the environment check of the tests that need the patched vLLM.

Those in engine/ and serving/ start it on the CPU: a few engines, one at a time, each with as many
cases as it can serve. A missing piece is an error, never a skip.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import pytest

from vllm_r3.demo.tiny_models import write_model
from vllm_r3.replay.oracle import Oracle

NEED_VLLM = ("upstream", "engine", "serving")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse to start in an environment whose vLLM is missing or stock."""
    here = Path(__file__).parent
    if not any(item.path.relative_to(here).parts[0] in NEED_VLLM for item in items):
        return
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("tests: expected vLLM, found none; run ./build.sh test")
    if importlib.util.find_spec("vllm.v1.routed_experts") is None:
        raise pytest.UsageError(
            "tests: expected the patched vLLM, found a stock one; run ./build.sh test"
        )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny model, written at first use."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda kind: write_model(kind, root / kind))


@pytest.fixture(scope="session")
def oracles(models: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """Oracle of a tiny model, loaded at first use."""
    return cache(lambda kind: Oracle(str(models(kind))))


@pytest.fixture(scope="session")
def force_async() -> Callable[[bool], AbstractContextManager[None]]:
    """Context in which the CPU platform leaves async scheduling on (or off, as it does)."""

    @contextmanager
    def forced(on: bool) -> Iterator[None]:
        from vllm.platforms.cpu import CpuPlatform

        stock = CpuPlatform.__dict__["check_and_update_config"]

        def check_and_update_config(cls: type, vllm_config: object) -> None:
            stock.__func__(cls, vllm_config)
            vllm_config.scheduler_config.async_scheduling = on  # type: ignore[attr-defined]
            if on:
                worker = "async_worker.AsyncCPUWorker"
                vllm_config.parallel_config.worker_cls = worker  # type: ignore[attr-defined]

        CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
        try:
            yield
        finally:
            CpuPlatform.check_and_update_config = stock

    return forced
