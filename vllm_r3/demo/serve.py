"""Run `vllm serve` as a child: start, wait until healthy, stop, and say why it failed.

`Server` is a context manager; leaving it stops the whole process group. Its log goes to a file, and
when the server dies the lines that say why are in the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from vllm_r3.errors import R3Error
from vllm_r3.send import send

HOST = "127.0.0.1"
SHOWN_LINES = 15
FOLLOWING = 2  # lines of a message after its first
STOP_S = 20.0

_ERROR = re.compile(r" ERROR |^(\(.*?\) )?(\w+\.)*\w*(Error|Exception|Exit)\b.*:|: error: ")
_RECORD = re.compile(r" (DEBUG|INFO|WARNING|ERROR) \d|^(\(.*?\) )?(Traceback| +File )")
_FRAME = re.compile(r"\] +(File |\^+|raise |return )|\] {4,}\S|Traceback \(|\] *$")


def free_port(port: int = 0) -> int:
    """Return this loopback port, or some one, that nothing listens on at this moment.

    Raises:
        R3Error: the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise R3Error(
                f"{HOST}:{port}: expected a free port, found it in use ({error.strerror}); "
                "stop what listens there or choose another port"
            ) from None
        return int(probe.getsockname()[1])


def vllm_program() -> str:
    """Return the `vllm` of this interpreter: beside it, or where its packages' scripts go.

    The two differ where the system's own Python holds vLLM, as in container images.
    """
    beside = Path(sys.executable).with_name("vllm")
    scripts = Path(sysconfig.get_path("scripts")) / "vllm"
    return str(scripts if scripts.exists() and not beside.exists() else beside)


def reasons(log: str) -> list[str]:
    """Return the lines of a vLLM log that tell what went wrong, oldest first, without repeats.

    Log records of level ERROR, the last line of each traceback and what its message goes on with;
    all lines if there are none.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told: list[str] = []
    follows = 0
    for line in lines:
        is_error = bool(_ERROR.search(line)) and not _FRAME.search(line)
        if is_error or (follows and not _RECORD.search(line)):
            told.append(line)
        follows = FOLLOWING if is_error else max(follows - 1, 0)
    return list(dict.fromkeys(told or lines))[-SHOWN_LINES:]


class Server:
    """One `vllm serve` process, its address (`url`, `port`) and the file of all it printed."""

    def __init__(
        self,
        model_dir: Path,
        *options: str,
        log_path: Path,
        port: int | None = None,
        vllm: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Prepare; nothing starts before `start` or `with`.

        Args:
            vllm: the command, default `vllm` beside the running Python.
            env: variables set on top of this process's environment.
            progress: called with a short text now and then while waiting.
        """
        self.port = free_port() if port is None else port
        self.url = f"http://{HOST}:{self.port}"
        self.log_path = log_path
        address = ("--host", HOST, "--port", str(self.port))
        self._command = [*(vllm or [vllm_program()]), "serve", str(model_dir), *address, *options]
        self._env = {**os.environ, **(env or {})}
        self._timeout_s = timeout_s
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and return once `/health` answers 200.

        Raises:
            R3Error: the port is in use, there is no `vllm`, the process died or took too long.
        """
        free_port(self.port)
        try:
            with self.log_path.open("wb") as log:
                self._process = self._spawn(log)
        except OSError as error:
            raise R3Error(f"cannot start {self._command[0]}: {error.strerror}") from None
        try:
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise

    def _spawn(self, log: BinaryIO) -> subprocess.Popen[bytes]:
        """Start the process, the first of a process group of its own."""
        return subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _wait_healthy(self) -> None:
        began = told = time.monotonic()
        while not self._is_healthy():
            now = time.monotonic()
            self._require_alive("while starting")
            if now - began > self._timeout_s:
                raise R3Error(self._failure(f"not healthy after {self._timeout_s:.0f} s"))
            if now - told > 10:
                told = now
                self._progress(f"server is starting, {now - began:.0f} s")
            time.sleep(0.25)

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError):
            return self.request("GET", "/health", timeout_s=5)[0] == 200
        return False

    def _require_alive(self, when: str) -> None:
        status = self._process.poll() if self._process else None
        if status is not None:
            raise R3Error(self._failure(f"exited with status {status} {when}"))

    def _failure(self, what: str) -> str:
        log = self.log_path.read_text(errors="replace")
        shown = "".join(f"\n    {line}" for line in reasons(log))
        return f"vllm serve {what}; its log {self.log_path} says:{shown}"

    def request(
        self, method: str, path: str, body: Any = None, timeout_s: float = 300.0
    ) -> tuple[int, bytes]:
        """Send one request, JSON body if given; return the status and the raw answer.

        Raises:
            OSError: no connection; also when the server closed it without an answer.
        """
        return send(method, self.url + path, body, timeout_s)

    def ask(self, path: str, body: Any = None) -> Any:
        """GET without a body, POST with one; return the decoded answer.

        Raises:
            R3Error: any status but 200, or the server is gone.
        """
        method = "GET" if body is None else "POST"
        try:
            status, answer = self.request(method, path, body)
        except OSError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)  # the socket ends before its process
            self._require_alive(f"during {method} {path}")
            raise R3Error(f"{method} {path}: expected an answer, got {error}") from None
        if status != 200:
            raise R3Error(f"{method} {path}: expected 200, got {status}: {answer.decode()[:500]}")
        return json.loads(answer)

    def stop(self) -> None:
        """End the process and all it started: SIGTERM, then SIGKILL after STOP_S seconds."""
        process, self._process = self._process, None
        for number, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
            if process is not None:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(timeout=patience)
