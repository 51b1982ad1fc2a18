# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests are found by the ids that clients know, whichever server they came to."""

import asyncio
from types import SimpleNamespace

import pytest

from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.named_aborts import find_named

RUNNING = ["cmpl-a-0", "cmpl-a-1", "cmpl-a-b-0", "chatcmpl-c", "generate-tokens-d", "e"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a"], ["cmpl-a-0", "cmpl-a-1"]),
        (["cmpl-a"], ["cmpl-a-0", "cmpl-a-1"]),
        (["cmpl-a-1"], ["cmpl-a-1"]),
        (["a-b"], ["cmpl-a-b-0"]),
        (["c", "d"], ["chatcmpl-c", "generate-tokens-d"]),
        (["chatcmpl-c", "generate-tokens-d"], ["chatcmpl-c", "generate-tokens-d"]),
        (["e", "e", "unknown"], ["e"]),
        (["a-0", "cmpl", "", "b"], []),
        ([], []),
        (None, RUNNING),
    ],
)
def test_a_request_is_found_by_each_of_its_names(names, found: list[str]):
    requests = [SimpleNamespace(external_req_id=name) for name in RUNNING]
    assert [r.external_req_id for r in find_named(requests, names)] == found


def test_every_engine_is_told_and_choices_of_a_request_count_once():
    found = {"engine 0": ["a", "a", "b"], "engine 1": ["b"]}
    told = []

    async def call(method, names, engine):
        told.append((method, names, engine))
        return found[engine]

    client = SimpleNamespace(core_engines=list(found), _call_utility_async=call)
    aborted = asyncio.run(AsyncMPClient.abort_named_async(client, ["a", "b"]))
    assert aborted == {"a", "b"}
    assert told == [("abort_named", ["a", "b"], engine) for engine in found]
