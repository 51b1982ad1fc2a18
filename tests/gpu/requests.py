"""The model and the requests of the GPU comparisons, and how a server is asked for rows."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

NUM_REQUESTS = 256


def make_model(directory: Path) -> None:
    """A Qwen3-MoE of six layers, the third one dense, 64 experts, top-8."""
    from vllm_r3 import tiny

    tiny.KINDS["gpu"] = (
        "qwen3_moe",
        dict(
            num_hidden_layers=6,
            mlp_only_layers=[2],
            hidden_size=512,
            intermediate_size=1024,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=256,
            norm_topk_prob=True,
        ),
    )
    tiny.write_model("gpu", directory)


def make_requests() -> list[tuple[list[int], int]]:
    """Prompts of mixed lengths, a quarter with a shared prefix, and their max_tokens."""
    rng = np.random.default_rng(7)
    shared = rng.integers(3, 500, size=100).tolist()
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = rng.integers(3, 500, size=int(rng.integers(1, 600))).tolist()
        requests.append(((shared + prompt) if i % 4 == 0 else prompt, int(rng.integers(1, 64))))
    return requests


def served_rows(flags: dict[str, Any], model: str, out: str) -> None:
    """Serve the model with `flags`, send all requests twice at once, save tokens and rows."""
    import httpx

    port = 8100 + int(time.time()) % 800
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        model,
        "--port",
        str(port),
    ]
    command += [
        "--enable-return-routed-experts",
        "--max-model-len",
        "1024",
        "--max-num-batched-tokens",
        "1024",
    ]
    command += ["--max-num-seqs", "64", "--gpu-memory-utilization", "0.3", "--dtype", "bfloat16"]
    for flag, value in flags.items():
        command += [flag] if value is None else [flag, str(value)]
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(timeout=120, limits=httpx.Limits(max_connections=300)) as client:
            _wait(client, url, server)
            print("info", client.get(f"{url}/routed_experts/info").text, flush=True)
            saved: dict[str, np.ndarray] = {}
            for turn in range(2):
                with ThreadPoolExecutor(256) as pool:
                    answers = list(
                        pool.map(lambda request: _ask(client, url, *request), make_requests())
                    )
                for i, (tokens, rows) in enumerate(answers):
                    saved[f"tokens{turn}_{i}"], saved[f"rows{turn}_{i}"] = tokens, rows
            np.savez(out, **saved)
            metrics = client.get(f"{url}/metrics").text.splitlines()
            print(
                "\n".join(line for line in metrics if line.startswith("vllm:routed_experts")),
                flush=True,
            )
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait(client: Any, url: str, server: subprocess.Popen) -> None:
    import httpx

    while server.poll() is None:
        try:
            if client.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the server ended with {server.returncode}")


def _ask(
    client: Any, url: str, prompt: list[int], max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    from vllm_r3.routes import decode_choice

    sampling = dict(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    answer = client.post(
        f"{url}/inference/v1/generate",
        json=dict(token_ids=prompt, sampling_params=sampling, return_routed_experts=True),
    )
    answer.raise_for_status()
    body = answer.json()
    tokens = prompt + body["choices"][0]["token_ids"]
    return np.array(tokens), decode_choice(body, num_prompt=len(prompt)).rows
