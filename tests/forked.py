"""Processes forked from one that has imported vLLM: servers, and engines with one of their own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, BinaryIO

from cpu_platform import ENV, changed_platform

from vllm_r3.demo.serve import Server

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
]


def warm_up() -> None:
    """Start the process that forks, unless it runs."""
    from multiprocessing.forkserver import ensure_running

    _CONTEXT.set_forkserver_preload(_PRELOADED)
    before = dict(os.environ)
    os.environ.update(ENV)
    try:
        ensure_running()
    finally:
        for name in ENV:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in ENV if name in before})


class Forked:
    """A forked process, with the part of subprocess.Popen that `Server` uses."""

    def __init__(
        self, call: Callable[..., Any], *args: Any, log_path: Path, env: Mapping[str, str]
    ) -> None:
        warm_up()
        self._process = _CONTEXT.Process(target=_run, args=(call, args, log_path, dict(env)))
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return self._process.exitcode


def _run(call: Callable[..., Any], args: Any, log_path: Path, env: dict[str, str]) -> None:
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(env)
    # one of its own, which writes to this log what the process has left behind
    resource_tracker._resource_tracker._fd = None
    sys.exit(call(*args))


def _vllm(command: list[str], data_parallel: bool = False) -> Any:
    from vllm.entrypoints.cli.main import main

    # else vLLM's command line chooses "spawn" for the engine core
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    sys.argv = command
    with changed_platform(data_parallel=data_parallel):
        return main()


def run_vllm(*args: str, log_path: Path) -> tuple[int, str]:
    """Run a command of `vllm` to its end; return its status and what it printed."""
    process = Forked(_vllm, ["vllm", *args], log_path=log_path, env=os.environ | ENV)
    return process.wait(300), log_path.read_text()


class ForkedServer(Server):
    """`vllm serve` in a forked process."""

    def __init__(self, *args: Any, data_parallel: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._data_parallel = data_parallel

    def _spawn(self, log: BinaryIO) -> Any:
        options = dict(log_path=self.log_path, env=self._env)
        return Forked(_vllm, self._command, self._data_parallel, **options)
