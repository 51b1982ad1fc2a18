"""Servers for the client's end-to-end tests: real, patched vLLM on the CPU, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_kit import ENV, OPTIONS, Running

from vllm_r3.oracle import Oracle
from vllm_r3.server import Server


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
