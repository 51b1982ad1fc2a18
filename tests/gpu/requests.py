"""The model and the requests of the GPU comparisons, and how a server is asked for rows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
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

    `args` are engine arguments by their Python names.
    """
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--port", str(port)]
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    server = subprocess.Popen(command, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    begin = time.time()
    try:
        with httpx.Client(timeout=200, limits=httpx.Limits(max_connections=300)) as client:
            _wait(client, url, server)
            print(f"started in {time.time() - begin:.0f} s", flush=True)
            print("info", client.get(f"{url}/routed_experts/info").text, flush=True)
            # Servers of several ranks on one GPU start together, but compute in turn.
            with open(Path(out).parent / "turn", "w") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)
                begin = time.time()
                np.savez(out, **_ask_all(client, url, requests))
                print(f"ran in {time.time() - begin:.0f} s", flush=True)
            metrics = client.get(f"{url}/metrics").text.splitlines()
            wanted = ("vllm:routed_experts", "vllm:prefix_cache_hits_total", "vllm:num_preempt")
            print("\n".join(line for line in metrics if line.startswith(wanted)), flush=True)
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _ask_all(client: Any, url: str, requests: int) -> dict[str, np.ndarray]:
    saved: dict[str, np.ndarray] = {}
    for turn in range(2):
        with ThreadPoolExecutor(256) as pool:
            asked = make_requests()[:requests]
            answers = list(pool.map(lambda request: _ask(client, url, *request), asked))
        for i, (tokens, rows) in enumerate(answers):
            saved[f"tokens{turn}_{i}"], saved[f"rows{turn}_{i}"] = tokens, rows
    return saved


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
    from vllm_r3.client import decode_choice

    sampling = dict(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    answer = client.post(
        f"{url}/inference/v1/generate",
        json=dict(token_ids=prompt, sampling_params=sampling, return_routed_experts=True),
    )
    answer.raise_for_status()
    body = answer.json()
    tokens = prompt + body["choices"][0]["token_ids"]
    return np.array(tokens), decode_choice(body, num_prompt=len(prompt)).rows
