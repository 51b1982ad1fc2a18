"""A running server and short ways to ask it, for the tests beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_r3.demo.serve import HOST, Server
from vllm_r3.replay.oracle import Oracle

ENV = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /pause and /resume
}
OPTIONS = (
    "--enable-return-routed-experts",
    "--enforce-eager",
    *("--served-model-name", "tiny", "--seed", "0"),
    *("--max-model-len", "512", "--block-size", "16"),
)


class Running:
    """A running server: its address, its model and the oracle of it."""

    def __init__(self, server: Server, model_dir: Path, oracle: Oracle) -> None:
        self.server = server
        self.url = f"http://{HOST}:{server.port}"
        self.model_dir = model_dir
        self.oracle = oracle

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST and return the parsed answer of a request that must succeed."""
        status, data = self.server.request("POST", path, {} if body is None else body)
        assert status == 200, data
        return json.loads(data) if data else None

    def num_generated(self) -> float:
        """Tokens that the server has generated since it started."""
        status, data = self.server.request("GET", "/metrics")
        assert status == 200, data
        name = "vllm:generation_tokens_total{"
        lines = data.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def generate(self, tokens: list[int], max_tokens: int, **more: Any) -> Any:
        """Greedy tokens from token ids, with rows."""
        params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"token_ids": tokens, "sampling_params": params, **more}
        return self.post("/inference/v1/generate", body)
