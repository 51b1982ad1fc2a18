# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GET /routed_experts/info."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm.entrypoints.serve.routed_experts.api_router import (
    attach_router,
    init_routed_experts_state,
)
from vllm.version import __version__

INFO = {
    "num_layers": 4,
    "moe_layers": [1, 3],
    "num_experts": 300,
    "top_k": 2,
    "dtype": "int16",
}


class FakeEngine:
    """An engine whose workers all answer INFO."""

    def __init__(self, enabled: bool) -> None:
        self.calls: list[str] = []
        self.model_config = SimpleNamespace(
            enable_return_routed_experts=enabled,
            routed_experts_encoding="list",
            routed_experts_layout="full",
        )

    async def collective_rpc(self, method: str) -> list[dict]:
        self.calls.append(method)
        return [INFO, INFO]


def serve(engine: FakeEngine) -> FastAPI:
    app = FastAPI()
    attach_router(app)
    app.state.serving_tokens = SimpleNamespace()
    app.state.openai_serving_completion = SimpleNamespace()
    app.state.openai_serving_chat = None
    asyncio.run(init_routed_experts_state(engine, app.state))
    return app


def test_server_with_the_flag_tells_what_rows_look_like():
    engine = FakeEngine(enabled=True)
    app = serve(engine)
    answer = TestClient(app).get("/routed_experts/info")
    assert answer.status_code == 200
    assert answer.json() == {
        "enabled": True,
        **INFO,
        "encoding": "list",
        "layout": "full",
        "version": __version__,
    }
    assert engine.calls == ["get_routed_experts_info"]
    frontend = app.state.routed_experts
    assert app.state.serving_tokens.routed_experts is frontend
    assert app.state.openai_serving_completion.routed_experts is frontend


def test_server_without_the_flag_says_so_and_asks_no_worker():
    engine = FakeEngine(enabled=False)
    answer = TestClient(serve(engine)).get("/routed_experts/info")
    assert answer.json() == {"enabled": False, "version": __version__}
    assert engine.calls == []


@pytest.mark.parametrize("method", ["post", "put", "delete"])
def test_only_get_is_answered(method: str):
    client = TestClient(serve(FakeEngine(enabled=True)))
    assert getattr(client, method)("/routed_experts/info").status_code == 405
