# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Endpoints that have no place for routed experts ask the engine for none."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize("wanted", [None, True, False])
def test_endpoint_that_says_nothing_asks_for_none(wanted: bool | None):
    engine = Engine()
    client = OpenAIServing(engine, None, request_logger=None).engine_client
    params = SamplingParams(return_routed_experts=wanted)

    async def generate() -> list[RequestOutput]:
        results = client.generate("a", params, "0", priority=3)
        return [result async for result in results]

    (result,) = asyncio.run(generate())
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


def test_messages_ask_for_none_as_chats():
    body = {"model": "m", "max_tokens": 6}
    body["messages"] = [{"role": "user", "content": "hello"}]
    request = AnthropicMessagesRequest.model_validate(body)
    chat = AnthropicServingMessages._convert_anthropic_to_openai_request(request)
    assert chat.return_routed_experts is False
