# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Endpoints that have no place for routed experts ask the engine for none."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi.testclient import TestClient

from vllm.entrypoints import api_server
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.engine.serving import OpenAIServing
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams


class Engine:
    """An engine that remembers what it was asked for."""

    errored = False
    renderer = input_processor = None

    def __init__(self, enabled: bool = True) -> None:
        self.model_config = SimpleNamespace(enable_return_routed_experts=enabled)
        self.asked: list[tuple[Any, ...]] = []

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        asked = (prompt, sampling_params.return_routed_experts, request_id, kwargs)
        self.asked.append(asked)
        yield RequestOutput(request_id, "a", [1], None, [], True)


async def generate(client: Any, **params: Any) -> list[RequestOutput]:
    results = client.generate("a", SamplingParams(**params), "0", priority=3)
    return [result async for result in results]


@pytest.mark.parametrize("wanted", [None, True, False])
def test_endpoint_that_says_nothing_asks_for_none(wanted: bool | None):
    engine = Engine()
    client = OpenAIServing(engine, None, request_logger=None).engine_client
    (result,) = asyncio.run(generate(client, return_routed_experts=wanted))
    assert result.request_id == "0"
    assert engine.asked == [("a", bool(wanted), "0", {"priority": 3})]
    assert client.errored is False


def test_without_the_flag_the_client_is_the_engine_itself():
    engine = Engine(enabled=False)
    serving = OpenAIServing(engine, None, request_logger=None)
    assert serving.engine_client is engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ours", [{}, {"return_routed_experts": True}])
def test_legacy_generate_asks_for_none(monkeypatch, stream: bool, ours: dict):
    engine = Engine()
    monkeypatch.setattr(api_server, "engine", engine)
    body = {"prompt": "a", "stream": stream, **ours}
    answer = TestClient(api_server.app).post("/generate", json=body)
    assert answer.json() == {"text": []}
    assert [asked[1] for asked in engine.asked] == [False]


class Served(Exception):
    """Ends a server with the client that its requests go to."""


def serve(client: Any, start_time: float) -> None:
    raise Served(client)


def test_grpc_server_asks_for_none(monkeypatch):
    pytest.importorskip("smg_grpc_servicer", reason="needs vllm[grpc]")
    from vllm.entrypoints import grpc_server

    engine = Engine()
    monkeypatch.setattr(grpc_server, "AsyncEngineArgs", MagicMock())
    async_llm = SimpleNamespace(from_vllm_config=lambda **kwargs: engine)
    monkeypatch.setattr(grpc_server, "AsyncLLM", async_llm)
    monkeypatch.setattr(grpc_server, "VllmEngineServicer", serve)
    with pytest.raises(Served) as served:
        asyncio.run(grpc_server.serve_grpc(MagicMock(model="m")))
    asyncio.run(generate(served.value.args[0]))
    assert [asked[1] for asked in engine.asked] == [False]


def test_messages_ask_for_none_as_chats():
    body = {"model": "m", "max_tokens": 6}
    body["messages"] = [{"role": "user", "content": "hello"}]
    request = AnthropicMessagesRequest.model_validate(body)
    chat = AnthropicServingMessages._convert_anthropic_to_openai_request(request)
    assert chat.return_routed_experts is False
