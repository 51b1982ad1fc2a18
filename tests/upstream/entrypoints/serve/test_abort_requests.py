# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""POST /inference/v1/abort_requests and /abort_requests."""

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm.entrypoints.serve.abort.api_router import attach_router

BY_ID, DEV = "/inference/v1/abort_requests", "/abort_requests"


@pytest.fixture(params=["1", "0"], ids=["dev", "no dev"])
def is_dev(request, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", request.param)
    return request.param == "1"


@pytest.fixture
def told() -> list:
    return []


@pytest.fixture
def client(is_dev: bool, told: list) -> TestClient:
    async def abort_and_answer(names):
        told.append(names)
        return 2

    app = FastAPI()
    attach_router(app)
    app.state.engine_client = SimpleNamespace(abort_and_answer=abort_and_answer)
    return TestClient(app)


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (BY_ID, b'{"request_ids": ["a", "b"]}', ["a", "b"]),
        (BY_ID, b'{"request_ids": "a", "model": "tiny"}', ["a"]),
        (BY_ID, b'{"request_ids": []}', []),
        (DEV, b'{"request_ids": ["a"]}', ["a"]),
        (DEV, b'{"request_ids": []}', None),
        (DEV, b"{}", None),
    ],
)
def test_the_engine_is_told_whom_to_end(
    client: TestClient, is_dev: bool, told: list, path: str, body: bytes, names
):
    answer = client.post(path, content=body)  # without a content type
    if path == DEV and not is_dev:
        assert (answer.status_code, told) == (404, [])
        return
    assert answer.status_code == 200
    assert answer.json() == {"status": "aborted", "aborted": 2}
    assert told == [names]


@pytest.mark.parametrize("is_dev", ["1"], indirect=True)
@pytest.mark.parametrize("path", [BY_ID, DEV])
@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "the request body"),
        (b"{", "the request body"),
        (b'["a"]', "the request body"),
        (b'{"request_ids": 3}', "request_ids"),
        (b'{"request_ids": ["a", 3]}', "request_ids"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(
    client: TestClient, told: list, path: str, body: bytes, where: str
):
    answer = client.post(path, content=body)
    assert (answer.status_code, told) == (400, [])
    detail = answer.json()["detail"]
    assert detail.startswith('expected {"request_ids": [id, ...]}, ' + where)


def test_ids_must_be_given_where_all_is_not_offered(client: TestClient, told: list):
    answer = client.post(BY_ID, json={})
    assert (answer.status_code, told) == (400, [])
    assert answer.json()["detail"] == "Missing 'request_ids' in request body"
