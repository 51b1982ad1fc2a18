# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Encoding "file": files are whole or gone, and nothing is left behind."""

import asyncio
import hashlib
import io
import json
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from pydantic import BaseModel

from vllm.config.routed_experts_dir import check_routed_experts_dir
from vllm.entrypoints.openai.server_utils import http_exception_handler
from vllm.entrypoints.serve.routed_experts.api_router import (
    _OpenFileResponse,
    attach_router,
)
from vllm.entrypoints.serve.routed_experts.files import (
    RoutedExpertsFileRows,
    RoutedExpertsFiles,
)
from vllm.entrypoints.serve.routed_experts.protocol import ChoiceRows
from vllm.entrypoints.serve.routed_experts.splice import json_response, sse_event
from vllm.v1.engine.exceptions import EngineGenerateError

ROWS = np.arange(5 * 3 * 2, dtype="uint8").reshape(5, 3, 2)
NBYTES = 128 + ROWS.nbytes
FILES = "/routed_experts/files"


def npy(rows: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()


def open_files(directory: Path, ttl: float = 600, max_bytes: int | None = None):
    return RoutedExpertsFiles(str(directory), ttl, max_bytes)


@pytest.fixture
def files(tmp_path: Path):
    with closing(open_files(tmp_path)) as files:
        yield files


def write(files: RoutedExpertsFiles, *all_rows: np.ndarray) -> list[dict]:
    async def run():
        return [await files.write(rows) for rows in all_rows]

    return asyncio.run(run())


def names(directory: Path) -> list[str]:
    """What is there, but for the locks."""
    return sorted(p.name for p in directory.iterdir() if p.suffix != ".lock")


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        ROWS[:0],
        ROWS[::2, :, ::-1],
        ROWS.astype("int16") + 300,
        np.frombuffer(ROWS.tobytes(), ">i2").reshape(5, 3, 1),
    ],
    ids=["uint8", "empty", "strided", "int16", "big endian"],
)
def test_file_is_what_numpy_would_save(files, tmp_path, rows):
    (reference,) = write(files, rows)
    data = (tmp_path / reference["name"]).read_bytes()
    assert data == npy(np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")))
    digest = hashlib.sha256(data).hexdigest()
    assert reference | {"name": ""} == dict(name="", nbytes=len(data), sha256=digest)
    assert names(tmp_path) == [reference["name"]]


def test_nothing_of_its_own_is_left_after_the_end(tmp_path):
    (tmp_path / "foreign.npy").touch()
    with closing(open_files(tmp_path)) as other:
        (kept,) = write(other, ROWS)
        with closing(open_files(tmp_path)) as files:
            write(files, ROWS, ROWS)
        assert names(tmp_path) == ["foreign.npy", kept["name"]]
    assert [path.name for path in tmp_path.iterdir()] == ["foreign.npy"]


def test_names_are_not_alike(files):
    references = write(files, *[ROWS] * 20)
    secrets = {reference["name"].split("-")[3] for reference in references}
    assert len(secrets) == 20 and all(len(secret) == 36 for secret in secrets)


def test_file_goes_after_its_time(tmp_path):
    async def run(files):
        reference = await files.write(ROWS)
        assert files.open(reference["name"]).read() == npy(ROWS)
        deadline = time.monotonic() + 10
        while names(tmp_path) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    with closing(open_files(tmp_path, ttl=0.2)) as files:
        asyncio.run(run(files))
        assert names(tmp_path) == []


def test_oldest_go_first_whoever_wrote_them(tmp_path):
    limit = 3 * NBYTES
    with (
        closing(open_files(tmp_path, max_bytes=limit)) as one,
        closing(open_files(tmp_path, max_bytes=limit)) as two,
    ):
        written = []
        for files in (one, two, one, two, one):
            written += [reference["name"] for reference in write(files, ROWS)]
            time.sleep(0.01)
            assert names(tmp_path) == sorted(written[-3:])
        with pytest.raises(FileNotFoundError):
            one.open(written[0])
        assert one.open(written[3]).read() == npy(ROWS)


def test_rows_above_the_limit_are_an_error(tmp_path):
    with closing(open_files(tmp_path, max_bytes=NBYTES - 1)) as files:
        with pytest.raises(EngineGenerateError) as error:
            write(files, ROWS)
        assert names(tmp_path) == []
    assert str(error.value) == (
        "routed experts of 158 bytes are more than --routed-experts-dir-bytes 157"
    )


@contextmanager
def full_disk(nbytes: int):
    """Let the system write so much of a file and no more."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_file_that_cannot_be_written_whole_is_an_error_and_not_there(files, tmp_path):
    rows = np.zeros((4096, 3, 2), "uint8")
    with full_disk(10_000), pytest.raises(EngineGenerateError) as error:
        write(files, rows)
    assert names(tmp_path) == []
    assert str(error.value) == (
        "routed experts of 24704 bytes cannot be written to --routed-experts-dir: "
        "File too large"
    )
    write(files, rows)


class Answer(BaseModel):
    routed_experts_meta: int = 0
    routed_experts: ChoiceRows
    prompt_routed_experts: ChoiceRows


async def text_of(answer: Answer, stream: bool) -> str:
    if stream:
        parts = [part async for part in sse_event(answer)]
        return "".join(parts).removeprefix("data: ")
    response = await json_response(answer)
    return b"".join([part async for part in response.body_iterator]).decode()


def sent(files: RoutedExpertsFiles, stream: bool, *all_rows: np.ndarray) -> dict:
    prompt_rows, rows = (RoutedExpertsFileRows(rows, files) for rows in all_rows)
    answer = Answer(routed_experts=rows, prompt_routed_experts=prompt_rows)
    return json.loads(asyncio.run(text_of(answer, stream)))


@pytest.mark.parametrize("stream", [False, True])
def test_answer_names_files_that_are_whole(files, tmp_path, stream):
    found = sent(files, stream, ROWS[:1], ROWS)
    for field, rows in (("routed_experts", ROWS), ("prompt_routed_experts", ROWS[:1])):
        np.testing.assert_array_equal(np.load(tmp_path / found[field]["name"]), rows)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_that_fails_leaves_no_file(files, tmp_path, stream):
    with full_disk(10_000), pytest.raises(EngineGenerateError, match="too large"):
        sent(files, stream, np.zeros((4096, 3, 2), "uint8"), ROWS)
    assert names(tmp_path) == []


KILLED = """
import asyncio, sys, time, numpy as np
from vllm.entrypoints.serve.routed_experts.files import RoutedExpertsFiles
files = RoutedExpertsFiles(sys.argv[1], 600, None)
for _ in range(3):
    asyncio.run(files.write(np.zeros((2, 3, 2), "uint8")))
open(f"{sys.argv[1]}/.routed-experts-{files._owner}-{'0' * 32}.npy.tmp", "w").close()
print("ready", flush=True)
time.sleep(600)
"""


def test_leftovers_of_a_killed_server_go_and_no_others(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with (
        closing(open_files(tmp_path)) as alive,
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
    ):
        kept = [reference["name"] for reference in write(alive, ROWS)]
        (tmp_path / "routed-experts-mine.npy").touch()
        try:
            assert process.stdout and process.stdout.readline() == b"ready\n"
            open_files(tmp_path).close()
            assert len(names(tmp_path)) == 6  # the other process runs
        finally:
            process.kill()
            process.wait()
        open_files(tmp_path).close()
        assert names(tmp_path) == sorted([*kept, "routed-experts-mine.npy"])
        assert len(list(tmp_path.glob(".*.lock"))) == 1


def serve(directory: Path | None, api_key: list[str] | None = None) -> FastAPI:
    app = FastAPI()
    attach_router(app)
    app.exception_handler(HTTPException)(http_exception_handler)
    config = SimpleNamespace(
        routed_experts_dir=directory and str(directory),
        routed_experts_file_ttl=60.0,
        routed_experts_dir_bytes=10**6,
    )
    app.state.args = SimpleNamespace(api_key=api_key, log_error_stack=False)
    app.state.routed_experts = SimpleNamespace(
        enabled=True, model_config=config, files=None
    )
    return app


@pytest.fixture
def server(tmp_path):
    with TestClient(serve(tmp_path)) as client:
        yield client
    assert names(tmp_path) == []


def written(server: TestClient) -> tuple[str, bytes]:
    (reference,) = write(server.app.state.routed_experts.files, ROWS)
    return f"{FILES}/{reference['name']}", npy(ROWS)


def test_file_is_read_in_one_or_in_parts(server):
    path, data = written(server)
    whole = server.get(path)
    assert (whole.status_code, whole.content) == (200, data)
    assert whole.headers["content-type"] == "application/octet-stream"
    assert whole.headers["accept-ranges"] == "bytes"
    for wanted, found in (
        ("0-9", slice(0, 10)),
        ("128-", slice(128, None)),
        ("-30", slice(-30, None)),
        ("150-999", slice(150, None)),
    ):
        part = server.get(path, headers={"Range": f"bytes={wanted}"})
        assert (part.status_code, part.content) == (206, data[found])
        assert part.headers["content-range"].endswith(f"/{len(data)}")
    assert server.get(path, headers={"Range": "bytes=158-"}).status_code == 416


def test_file_that_is_removed_while_it_is_read_is_read_to_its_end(server, tmp_path):
    path, data = written(server)
    file = server.app.state.routed_experts.files.open(path.rsplit("/")[-1])
    (tmp_path / path.rsplit("/")[-1]).unlink()
    messages = []

    async def send(message):
        messages.append(message)

    scope = {"type": "http", "method": "GET", "headers": []}
    asyncio.run(_OpenFileResponse(file)(scope, None, send))
    assert b"".join(m.get("body", b"") for m in messages) == data and file.closed


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../secret.npy",
        "..%2Fsecret.npy",
        "%2e%2e%2fsecret.npy",
        "%2Fetc%2Fpasswd",
        "/etc/passwd",
        "secret.npy",
        "secret.npy%00",
        f"routed-experts-{'0' * 16}-{'0' * 32}.npy",
        f"./routed-experts-{'1' * 16}-{'1' * 32}.npy",
        f"routed-experts-{'2' * 16}-{'2' * 32}.npy",
        f".routed-experts-{'0' * 16}-{'0' * 32}.npy.tmp",
    ],
)
def test_no_other_file_is_read(server, tmp_path, name):
    (tmp_path / "secret.npy").write_bytes(b"secret")
    link = tmp_path / f"routed-experts-{'2' * 16}-{'2' * 32}.npy"
    link.symlink_to(tmp_path / "secret.npy")
    answer = server.get(f"{FILES}/{name}")
    assert answer.status_code == 404 and b"secret\n" not in answer.content
    (tmp_path / "secret.npy").unlink()
    link.unlink()


def test_reason_is_told_when_a_file_is_gone(server, tmp_path):
    path, _ = written(server)
    name = path.rsplit("/")[-1]
    (tmp_path / name).unlink()
    answer = server.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        f"there is no file {name}, or no longer: files are removed after 60 s, and "
        "the oldest first above 1000000 bytes in all"
    )


def test_server_without_a_directory_says_so():
    with TestClient(serve(None)) as client:
        answer = client.get(f"{FILES}/any.npy")
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message == "the server runs without --routed-experts-dir"


@pytest.mark.parametrize("host", ["testserver", "x/?", "x/health?"])
def test_api_key_is_asked_for(tmp_path, host):
    with TestClient(serve(tmp_path, ["right", "too"])) as client:
        path, data = written(client)
        for key in (None, "Bearer wrong", "right", "Basic right"):
            headers = {"Host": host} | ({"Authorization": key} if key else {})
            assert client.get(path, headers=headers).status_code == 401
        for key in ("right", "too"):
            headers = {"Host": host, "Authorization": f"Bearer {key}"}
            assert client.get(path, headers=headers).content == data


def config(directory, encoding="npy", ttl=600.0, max_bytes=None):
    return SimpleNamespace(
        routed_experts_dir=directory and str(directory),
        routed_experts_encoding=encoding,
        routed_experts_file_ttl=ttl,
        routed_experts_dir_bytes=max_bytes,
    )


def test_directory_that_can_be_used_is_accepted_and_left_empty(tmp_path):
    check_routed_experts_dir(config(tmp_path, "file", 0.5, 1))
    check_routed_experts_dir(config(None))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(directory=None, encoding="file"), "--routed-experts-encoding file needs"),
        (dict(directory="/none/such"), "got: No such file or directory"),
        (dict(directory=__file__), "got: Not a directory"),
        (dict(directory="/proc/self"), "--routed-experts-dir /proc/self: expected"),
        (dict(directory="/tmp", ttl=0.0), "file-ttl must be more than 0 seconds"),
        (dict(directory="/tmp", ttl=float("inf")), "got inf"),
        (dict(directory="/tmp", max_bytes=0), "dir-bytes must be more than 0, got 0"),
    ],
)
def test_what_cannot_be_used_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_routed_experts_dir(config(**options))
