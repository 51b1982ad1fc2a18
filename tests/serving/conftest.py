"""The servers of the serving tests: few, and one at a time.

Tests are ordered by the server they ask, so that each is started once; starting one stops
the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_server import ENV, OPTIONS, Running
from server_fixture import Kit, serving

from vllm_r3.demo.serve import Server
from vllm_r3.replay.oracle import Oracle

HERE = Path(__file__).parent
SERVERS = ("kit", "flagged", "wide", "off")

Start = Callable[..., Kit]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder by their server, keeping each one's order."""
    ours = [i for i, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[i] for i in ours), key=_server_number)
    for i, item in zip(ours, ordered, strict=True):
        items[i] = item


def _server_number(item: pytest.Item) -> int:
    names = getattr(item, "fixturenames", ())
    return next((n for n, name in enumerate(SERVERS) if name in names), len(SERVERS))


@pytest.fixture(scope="session")
def start_server(
    models: Callable, oracles: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Start a server on a tiny model and stop the one before."""
    logs = tmp_path_factory.mktemp("logs")
    with contextlib.ExitStack() as stack:

        def start_on(kind: str, *options: str, experts: bool = True) -> Kit:
            stack.close()
            log = logs / f"{kind}-{len(list(logs.iterdir()))}.log"
            run = serving(models(kind), oracles(kind), log, *options, experts=experts)
            return stack.enter_context(run)

        yield start_on


@pytest.fixture(scope="session")
def kit(start_server: Start) -> Kit:
    """A server with the flag on and everything else at its default."""
    return start_server("moe")


@pytest.fixture(scope="session")
def flagged(start_server: Start) -> Kit:
    """Other defaults, dense layers between, a tool parser and a reasoning parser."""
    return start_server(
        "dense-between",
        *("--routed-experts-encoding", "list", "--routed-experts-layout", "full"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--reasoning-parser", "granite"),
    )


@pytest.fixture(scope="session")
def wide(start_server: Start) -> Kit:
    """More than 256 experts."""
    return start_server("wide")


@pytest.fixture(scope="session")
def off(start_server: Start) -> Kit:
    """A server without the flag."""
    return start_server("moe", experts=False)


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest,
    models: Callable[[str], Path],
    oracles: Callable[[str], Oracle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    """The module's server, on the KIND of tiny model and in the DTYPE that the module names."""
    kind, dtype = request.module.KIND, request.module.DTYPE
    log = tmp_path_factory.mktemp("server") / "server.log"
    options = (*OPTIONS, "--dtype", dtype)
    with Server(models(kind), *options, log_path=log, env=ENV) as server:
        yield Running(server, models(kind), oracles(kind))
