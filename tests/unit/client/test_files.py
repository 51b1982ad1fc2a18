"""Encoding `file`: mapped where the directory is here, else fetched, and never another file."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sample_answers import refused, rows_of, split_answer

from vllm_r3.adapters.slime import assign_routed_experts
from vllm_r3.client import RolloutRoutes, RowFiles, decode_choice

ROWS = rows_of(8)
WHERE = "request req-1, choice 0, routed_experts"


def put(directory: Path, rows: np.ndarray, name: str = "") -> dict[str, Any]:
    """Write a file and say of it what a server says."""
    path = directory / (name or f"routed-experts-{rows[:, 0, 0].tolist()}.npy".replace(", ", "-"))
    path = path.with_name(path.name.replace("[", "").replace("]", ""))
    np.save(path, rows)
    data = path.read_bytes()
    return {"name": path.name, "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def answer(tmp_path: Path) -> dict[str, Any]:
    return split_answer(ROWS, 5, encode=lambda rows: put(tmp_path, rows))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server of the directory that asks for a key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = tmp_path / self.path.removeprefix("/routed_experts/files/")
            status, data = 404, b'{"error": {"message": "files are removed after 6 s"}}'
            if self.headers["Authorization"] != "Bearer key":
                status, data = 401, b"Unauthorized"
            elif path.exists():
                status, data = 200, path.read_bytes()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def decode(answer: Any, files: RowFiles) -> np.ndarray:
    return decode_choice(answer, num_prompt=5, files=files).rows


def test_files_are_mapped(answer, tmp_path) -> None:
    np.testing.assert_array_equal(decode(answer, RowFiles(tmp_path)), ROWS)


def test_one_file_is_not_copied_and_writing_to_it_changes_no_file(tmp_path) -> None:
    answer = split_answer(ROWS, 5)
    del answer["prompt_routed_experts"]
    answer["routed_experts_meta"]["layout"] = "full"
    reference = put(tmp_path, ROWS)
    answer["choices"][0]["routed_experts"] = reference
    rows = decode(answer, RowFiles(tmp_path))
    (tmp_path / reference["name"]).unlink()
    np.testing.assert_array_equal(rows, ROWS)
    assert rows.flags.writeable and not rows.flags.owndata
    answer["choices"][0]["routed_experts"] = put(tmp_path, ROWS)
    decode(answer, RowFiles(tmp_path))[:] = 0
    np.testing.assert_array_equal(np.load(tmp_path / reference["name"]), ROWS)


@pytest.mark.parametrize("directory", [None, "elsewhere"])
def test_files_are_fetched_where_the_directory_has_none(answer, url, tmp_path, directory) -> None:
    directory = directory and tmp_path / directory
    rows = decode(answer, RowFiles(directory, url, api_key="key"))
    np.testing.assert_array_equal(rows, ROWS)


def test_rollouts_and_samples_read_files(answer, tmp_path) -> None:
    files = RowFiles(tmp_path)
    rollout = RolloutRoutes(files=files)
    rollout.add_turn([0, 1, 2, 3, 4], answer)
    np.testing.assert_array_equal(rollout.finish(), ROWS)
    sample = SimpleNamespace(tokens=rollout.tokens, rollout_routed_experts=None)
    args = SimpleNamespace(num_layers=3, moe_router_topk=2)
    assign_routed_experts(sample, answer, args, files=files)
    np.testing.assert_array_equal(sample.rollout_routed_experts, ROWS)


@pytest.mark.parametrize(
    "name",
    ["../rows.npy", "/etc/passwd", "a/b.npy", ".hidden.npy", "rows.npz", "", "a\n.npy", 3, None],
)
def test_no_other_name_is_read(answer, tmp_path, url, name) -> None:
    answer["choices"][0]["routed_experts"]["name"] = name
    files = RowFiles(tmp_path / "inner", url, "key")
    with pytest.raises(Exception, match="expected (name to be|a plain name)") as error:
        decode(answer, files)
    assert type(error.value).__name__ == "RoutesError"


def test_files_without_a_place_are_an_error(answer) -> None:
    name = answer["choices"][0]["routed_experts"]["name"]
    message = f"{WHERE}: the rows are in the file {name}: give files=RowFiles(directory=…, url=…)"
    with refused(message):
        decode(answer, RowFiles())


def test_file_that_is_gone_is_an_error_with_the_servers_reason(answer, url, tmp_path) -> None:
    name = answer["choices"][0]["routed_experts"]["name"]
    (tmp_path / name).unlink()
    path = f"{url}/routed_experts/files/{name}"
    message = f"{WHERE}: expected {path}, got HTTP 404: files are removed after 6 s"
    with refused(message):
        decode(answer, RowFiles(tmp_path, url, "key"))
    with refused(f"{WHERE}: expected {path}, got HTTP 401: Unauthorized"):
        decode(answer, RowFiles(tmp_path, url))
    with refused(
        f"{WHERE}: expected {name} in {tmp_path}, which has none, or no longer; read it sooner, or "
        "give the server's url"
    ):
        decode(answer, RowFiles(tmp_path))


def test_another_file_than_the_answer_says_is_an_error(answer, tmp_path) -> None:
    reference = answer["choices"][0]["routed_experts"]
    path = tmp_path / reference["name"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    nbytes = reference["nbytes"]
    with refused(f"{WHERE}: expected {nbytes} bytes in {path.name}, got {nbytes - 1}"):
        decode(answer, RowFiles(tmp_path))
    path.write_bytes(whole[:-1] + b"\x0f")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with refused(f"{WHERE}: expected sha256 {reference['sha256']} of {path.name}, got {found}"):
        decode(answer, RowFiles(tmp_path))
    path.write_bytes(b"")
    with pytest.raises(Exception, match="cannot map .*: cannot mmap an empty file"):
        decode(answer, RowFiles(tmp_path))
