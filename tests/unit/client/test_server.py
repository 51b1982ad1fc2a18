"""`Server` against small stand-ins for `vllm`: healthy, silent, dying and stubborn ones."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest

from vllm_r3.demo.serve import Server, free_port, reasons
from vllm_r3.errors import R3Error

STAND_IN = """
import http.server, os, signal, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
MODE
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/health", "/json") else 404)
        self.end_headers()
        self.wfile.write(b'{"answer": 42}')
    def do_POST(self):
        os._exit(7)
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def make(tmp_path):
    """A Server around the stand-in, with `mode` run before it listens."""

    def make(mode: str = "", **options) -> Server:
        script = tmp_path / "stand_in.py"
        script.write_text(STAND_IN.replace("MODE", mode))
        return Server(
            tmp_path / "model",
            log_path=tmp_path / "log",
            vllm=[sys.executable, str(script)],
            **{"timeout_s": 20, **options},
        )

    return make


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"


def test_healthy_server_answers_and_is_gone_afterwards(make):
    with make() as server:
        assert server.ask("/json") == {"answer": 42}
    free_port(server.port)


def test_children_of_the_server_are_stopped_too(make, tmp_path):
    child = tmp_path / "child"
    spawn = f"open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    with make(spawn):
        pid = int(child.read_text())
        assert is_alive(pid)
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_port_in_use_is_named_before_anything_starts(make, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = (
            f"127.0.0.1:{port}: expected a free port, found it in use (Address already in use); "
            "stop what listens there or choose another port"
        )
        with pytest.raises(R3Error, match=f"^{re.escape(message)}$"):
            make(port=port).start()
    assert not (tmp_path / "log").exists()


def test_server_that_dies_while_starting_shows_its_error_lines(make, tmp_path):
    fail = (
        "print('INFO 11-30 all is well', flush=True)\n"
        "print('(EngineCore pid=1) ERROR 11-30 10:00:00 [core.py:1] no memory', flush=True)\n"
        "raise SystemExit(3)"
    )
    message = (
        f"vllm serve exited with status 3 while starting; its log {tmp_path / 'log'} says:\n"
        "    (EngineCore pid=1) ERROR 11-30 10:00:00 [core.py:1] no memory"
    )
    with pytest.raises(R3Error, match=f"^{re.escape(message)}$"):
        make(fail).start()


def test_server_that_never_gets_healthy_is_stopped(make, tmp_path):
    told = []
    server = make("import time; time.sleep(600)", timeout_s=1, progress=told.append)
    with pytest.raises(R3Error, match="^vllm serve not healthy after 1 s; its log "):
        server.start()
    free_port(server.port)


def test_server_that_ignores_sigterm_is_killed(make, monkeypatch, tmp_path):
    monkeypatch.setattr("vllm_r3.demo.serve.STOP_S", 0.5)
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    with make(f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {note}"):
        pid = int((tmp_path / "pid").read_text())
    assert not is_alive(pid)


def test_server_that_dies_during_a_request_is_an_error_with_its_status(make):
    message = "^vllm serve exited with status 7 during POST /x; "
    with make() as server, pytest.raises(R3Error, match=message):
        server.ask("/x", {})


def test_status_other_than_200_is_an_error_with_the_body(make):
    message = '^GET /y: expected 200, got 404: {"answer": 42}$'
    with make() as server, pytest.raises(R3Error, match=message):
        server.ask("/y")


def test_missing_vllm_is_named(tmp_path):
    server = Server(tmp_path, log_path=tmp_path / "log", vllm=[str(tmp_path / "vllm")])
    message = f"cannot start {tmp_path / 'vllm'}: No such file or directory"
    with pytest.raises(R3Error, match=f"^{re.escape(message)}$"):
        server.start()


def test_free_ports_are_free():
    free_port(free_port())


LOG = """\
(Worker pid=5) ERROR 11-30 21:02:44 [executor.py:9] WorkerProc hit an exception.
(Worker pid=5) ERROR 11-30 21:02:44 [executor.py:9] Traceback (most recent call last):
(Worker pid=5) ERROR 11-30 21:02:44 [executor.py:9]   File "executor.py", line 9, in loop
(Worker pid=5) ERROR 11-30 21:02:44 [executor.py:9]     output = func(*args)
(Worker pid=5) ERROR 11-30 21:02:44 [executor.py:9]              ^^^^^^^^^^^
(Worker pid=5) ERROR 11-30 21:02:44 [executor.py:9] RuntimeError: no driver
(APIServer pid=1) WARNING 11-30 21:02:45 [x.py:1] errors like `OSError: [Errno 24]`
(APIServer pid=1) ValidationError: 1 validation error for VllmConfig
(APIServer pid=1)   Value error, the dense model is refused
(APIServer pid=1) INFO 11-30 21:02:46 [x.py:2] good bye
vllm: error: unrecognized arguments: --bogus
"""


def test_reasons_are_error_records_and_the_message_of_each_traceback():
    assert reasons(LOG) == [
        "(Worker pid=5) ERROR 11-30 21:02:44 [executor.py:9] WorkerProc hit an exception.",
        "(Worker pid=5) ERROR 11-30 21:02:44 [executor.py:9] RuntimeError: no driver",
        "(APIServer pid=1) ValidationError: 1 validation error for VllmConfig",
        "(APIServer pid=1)   Value error, the dense model is refused",
        "vllm: error: unrecognized arguments: --bogus",
    ]


def test_log_without_errors_is_shown_from_its_end():
    assert reasons("\n".join(f"line {i}" for i in range(40)))[-1] == "line 39"
