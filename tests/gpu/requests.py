"""The model and the requests of the GPU comparisons, and how a server is asked for rows."""

from __future__ import annotations

import fcntl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from vllm_r3.demo.serve import Server

NUM_REQUESTS = 256


def make_model(directory: Path) -> None:
    """A Qwen3-MoE of six layers, the third one dense, 64 experts, top-8."""
    from vllm_r3.demo import tiny_models

    tiny_models.KINDS["gpu"] = (
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
    tiny_models.write_model("gpu", directory)


def make_requests() -> list[tuple[list[int], int]]:
    """Prompts of mixed lengths, a quarter with a shared prefix, and their max_tokens."""
    rng = np.random.default_rng(7)
    shared = rng.integers(3, 500, size=100).tolist()
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = rng.integers(3, 500, size=int(rng.integers(1, 600))).tolist()
        requests.append(((shared + prompt) if i % 4 == 0 else prompt, int(rng.integers(1, 64))))
    return requests


def served_rows(args: dict[str, Any], model: str, out: str, requests: int) -> None:
    """Serve the model, send `requests` of the requests twice, all at once, and save the rows.

    `args` are engine arguments by their Python names. The server's log lies beside `out`.
    """
    import httpx

    options = []
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        options += [flag] if value is True else [flag, str(value)]
    log = Path(out).with_suffix(".server.log")
    with Server(Path(model), *options, log_path=log) as server:
        print("info", server.ask("/routed_experts/info"), flush=True)
        limits = httpx.Limits(max_connections=300)
        # Servers of several ranks on one GPU start together, but compute in turn.
        with (
            httpx.Client(base_url=server.url, timeout=200, limits=limits) as client,
            open(Path(out).parent / "turn", "w") as turn,
        ):
            fcntl.flock(turn, fcntl.LOCK_EX)
            begin = time.time()
            np.savez(out, **_ask_all(client, requests))
            print(f"ran in {time.time() - begin:.0f} s", flush=True)
        metrics = server.request("GET", "/metrics")[1].decode().splitlines()
        wanted = ("vllm:routed_experts", "vllm:prefix_cache_hits_total", "vllm:num_preempt")
        print("\n".join(line for line in metrics if line.startswith(wanted)), flush=True)


def _ask_all(client: Any, requests: int) -> dict[str, np.ndarray]:
    saved: dict[str, np.ndarray] = {}
    for turn in range(2):
        with ThreadPoolExecutor(256) as pool:
            asked = make_requests()[:requests]
            answers = list(pool.map(lambda request: _ask(client, *request), asked))
        for i, (tokens, rows) in enumerate(answers):
            saved[f"tokens{turn}_{i}"], saved[f"rows{turn}_{i}"] = tokens, rows
    return saved


def _ask(client: Any, prompt: list[int], max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    from vllm_r3.client import decode_choice

    sampling = dict(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    answer = client.post(
        "/inference/v1/generate",
        json=dict(token_ids=prompt, sampling_params=sampling, return_routed_experts=True),
    )
    answer.raise_for_status()
    body = answer.json()
    tokens = prompt + body["choices"][0]["token_ids"]
    return np.array(tokens), decode_choice(body, num_prompt=len(prompt)).rows
