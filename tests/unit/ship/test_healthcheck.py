"""The health check of the images: which address it asks, and what it exits with."""

from __future__ import annotations

import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "docker" / "healthcheck.py"


def load():
    spec = importlib.util.spec_from_file_location("healthcheck", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[200, 503])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A server whose /health has a status: (status, port)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(request.param if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    made = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield request.param, made.server_port
    made.shutdown()


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("vllm serve m", "http://127.0.0.1:8000/health"),
        ("vllm serve m --port 9000", "http://127.0.0.1:9000/health"),
        ("vllm serve m --port=9000", "http://127.0.0.1:9000/health"),
        ("tini -- vllm serve m --host 0.0.0.0 --port 9000", "http://127.0.0.1:9000/health"),
        ("vllm serve m --host 10.0.0.7", "http://10.0.0.7:8000/health"),
        ("vllm serve m --host ::1", "http://[::1]:8000/health"),
        ("vllm serve m --host ::", "http://127.0.0.1:8000/health"),
        ("vllm serve m --ssl-keyfile k.pem", "https://127.0.0.1:8000/health"),
        ("vllm serve m --port", "http://127.0.0.1:8000/health"),
        ("", "http://127.0.0.1:8000/health"),
    ],
)
def test_address_is_that_of_the_command_line(words: str, url: str) -> None:
    assert load().health_url(words.split(" ")) == url


def ask(url: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "VLLM_R3_HEALTH_URL": url}
    return subprocess.run(
        [sys.executable, "-S", str(SCRIPT)], env=env, capture_output=True, text=True, check=False
    )


def test_exit_status_follows_the_answer(server: tuple[int, int]) -> None:
    status, port = server
    done = ask(f"http://127.0.0.1:{port}/health")
    assert done.returncode == (0 if status == 200 else 1)
    said = f"http://127.0.0.1:{port}/health: HTTP Error 503: Service Unavailable\n"
    assert done.stderr == ("" if status == 200 else said)


def test_nobody_listening_is_unhealthy() -> None:
    done = ask("http://127.0.0.1:1/health")
    assert done.returncode == 1
    assert done.stderr.startswith("http://127.0.0.1:1/health: ")
