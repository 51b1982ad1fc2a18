"""Start a Ray of one's own on this host, and stop it without touching any other.

An engine must find a running Ray: with a client of its own in the parent, the engine core that is
forked from it hangs. `ray stop` ends every Ray of a host, hence this: each node gets a session, a
folder and ports of its own, and what is left of the session in the end is killed.

Ray's workers inherit their node's environment, not the engine's: what must be there when they
start (PYTHONPATH, LD_PRELOAD, switches that vLLM does not copy) goes into `environment`. Linux
only; needs `ray` in this Python, which is not imported here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A node stops when the thread that started it is gone, so that a killed run leaves none behind.
START = """import ctypes, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
from ray.scripts.scripts import main
main()"""
START_LIMIT = 120.0  # seconds
STOP_LIMIT = 15.0
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # else every process wants a token
    "RAY_USAGE_STATS_ENABLED": "0",  # no reports to the network
    "RAY_memory_monitor_refresh_ms": "0",  # else workers die when the host is short of memory
}


@contextlib.contextmanager
def ray_head(
    num_gpus: int,
    num_cpus: int,
    environment: Mapping[str, str] | None = None,
    object_store_bytes: int = 2**27,
    gpus_of_others: Sequence[int] = (),
) -> Iterator[dict[str, str]]:
    """Run a Ray whose nodes have these resources, whether the host has them or not.

    Args:
        num_gpus: GPUs that the head is told of.
        num_cpus: CPUs that each node is told of; it starts as many idle workers.
        environment: for the nodes and all workers, on top of this process's.
        object_store_bytes: size of a node's shared memory for objects, 80 MB or more.
        gpus_of_others: GPUs of each further node. They have the addresses 127.0.0.2 and on, as if
            they were other hosts.

    Yields:
        The variables that a process needs to use this Ray: `environment`, with the repository put
        in front of its PYTHONPATH, and the head's address.

    Raises:
        RuntimeError: A node did not start; the message ends with its output.
    """
    given = {**(environment or {}), **SETTINGS}
    path = given.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    given["PYTHONPATH"] = os.pathsep.join([str(ROOT), path] if path else [str(ROOT)])
    common = {"num-cpus": num_cpus, "object-store-memory": object_store_bytes}
    with contextlib.ExitStack() as running:
        head = _head_options() | common | {"num-gpus": num_gpus}
        address = running.enter_context(_node(own_ip(), head, given))
        for index, gpus in enumerate(gpus_of_others):
            other = common | {"address": address, "num-gpus": gpus}
            running.enter_context(_node(f"127.0.0.{index + 2}", other, given))
        yield given | {"VLLM_HOST_IP": own_ip(), "RAY_ADDRESS": address}


def own_ip() -> str:
    """The address that this host would send from; no packet is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _head_options() -> dict[str, object]:
    client, dashboard = _free_ports(2)
    return {
        "head": True,
        "no-monitor": True,
        "port": 0,
        "ray-client-server-port": client,
        "dashboard-port": dashboard,
        "include-dashboard": "false",
    }


@contextlib.contextmanager
def _node(ip: str, options: Mapping[str, object], environment: Mapping[str, str]) -> Iterator[str]:
    """Run one node, yield the address of its head."""
    # not $TMPDIR: the paths of the sockets in it may have 107 characters
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    process = None
    try:
        with open(folder / "node.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", START, *_arguments(ip, folder, options)],
                env={**_without_ray(os.environ), **environment, "VLLM_HOST_IP": ip},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        yield _address(process, folder)
    finally:
        if process is not None:
            _stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def _arguments(ip: str, folder: Path, options: Mapping[str, object]) -> list[str]:
    common = {
        "block": True,
        "disable-usage-stats": True,
        "node-ip-address": ip,
        "temp-dir": folder,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "dashboard-agent-listen-port": _free_ports(1)[0],
    }
    pairs = {**common, **options}.items()
    return ["start", *(f"--{k}" if v is True else f"--{k}={v}" for k, v in pairs)]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def _without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what points to another Ray of this host."""
    return {k: v for k, v in environment.items() if k not in ("RAY_ADDRESS", "RAY_TMPDIR")}


def _address(node: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait for the file that Ray writes once all processes of a node run."""
    written = folder / "ray_current_cluster"
    begin = time.monotonic()
    while not _ended(node) and time.monotonic() < begin + START_LIMIT:
        if written.exists() and (address := written.read_text().strip()):
            return address
        time.sleep(0.1)
    output = (folder / "node.log").read_text(errors="replace")
    raise RuntimeError(
        f"ray_head: expected a running node, found it {'ended' if _ended(node) else 'starting'} "
        f"after {time.monotonic() - begin:.0f} s; its output ends with:\n{output[-3000:]}"
    )


def _ended(node: subprocess.Popen[bytes]) -> bool:
    """Whether the process is a zombie, left as one so that its id cannot become another's."""
    return os.waitid(os.P_PID, node.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _stop(node: subprocess.Popen[bytes]) -> None:
    """End a node and all of its session; no process of another session is touched."""
    os.kill(node.pid, signal.SIGTERM)
    end = time.monotonic() + STOP_LIMIT
    while not _ended(node) and time.monotonic() < end:
        time.sleep(0.1)
    end = time.monotonic() + STOP_LIMIT
    while (left := _session(node.pid)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    node.wait()


def _session(leader: int) -> list[int]:
    """Live processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state ppid pgrp session …; the name may hold anything
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found
