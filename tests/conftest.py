"""Models, oracles, the pool of engines and servers, and the check of the environment.

Tests in upstream/, engine/ and serving/ need the patched vLLM. A missing piece is an error, never
a skip.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "engine"))  # workers and platforms, which vLLM imports by name
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is there: workers are forked from this process

from pool import CONFIGURATIONS, STARTS, Pool, sort_by_use, used_by  # noqa: E402

from vllm_r3.demo.tiny_models import SEED, write_model  # noqa: E402
from vllm_r3.replay.oracle import Oracle  # noqa: E402

NEED_VLLM = ("upstream", "engine", "serving")
DRAFTED = {"drafted-moe": "moe", "drafted-glm4": "glm", "eagle": "eagle"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests by what they use; refuse an environment whose vLLM is missing or stock."""
    sort_by_use(items)
    if not any(item.path.relative_to(HERE).parts[0] in NEED_VLLM for item in items):
        return
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("tests: expected vLLM, found none; run ./build.sh test")
    if importlib.util.find_spec("vllm.v1.routed_experts") is None:
        raise pytest.UsageError(
            "tests: expected the patched vLLM, found a stock one; run ./build.sh test"
        )


_to_come: Counter[str] = Counter()
_pools: list[Pool] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the tests of each configuration."""
    _to_come.update(name for item in session.items for name in used_by(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Stop what no further test uses."""
    try:
        return (yield)
    finally:
        for name in used_by(item):
            _to_come[name] -= 1
            if not _to_come[name]:
                for pool in _pools:
                    pool.stop(name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many engines and servers were started, and how long that took."""
    if STARTS:
        seconds = sum(took for _, took in STARTS)
        listed = ", ".join(f"{name} {took:.0f}" for name, took in STARTS)
        line = f"{len(STARTS)} engines and servers started, in {seconds:.0f} s: {listed}"
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny model, written at first use."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def drafted() -> Path:
        from tests.gpu.lifecycle_models import write_all

        write_all(root / "drafted")
        return root / "drafted"

    def model(kind: str) -> Path:
        if kind in DRAFTED:
            return drafted() / DRAFTED[kind]
        if kind.endswith("-other"):
            return write_model(kind.removesuffix("-other"), root / kind, seed=SEED + 1)
        return write_model(kind, root / kind)

    return cache(model)


@pytest.fixture(scope="session")
def oracles(models: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """Oracle of a tiny model, loaded at first use."""
    return cache(lambda kind: Oracle(str(models(kind))))


@pytest.fixture(scope="session")
def pool(models: Any, oracles: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """What is started once for all tests of a configuration."""
    _pools.append(Pool(models, oracles, tmp_path_factory.mktemp("logs")))
    yield _pools[-1]
    _pools.pop().stop_all()


def _configuration(name: str) -> Any:
    @pytest.fixture(scope="module", name=name)
    def running(pool: Pool) -> Any:
        return pool.get(name)

    return running


globals().update({f"configuration {name}": _configuration(name) for name in CONFIGURATIONS})


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Any:
    """The engine or server of the configuration that is this fixture's parameter."""
    return request.getfixturevalue(request.param)
