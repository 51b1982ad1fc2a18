"""Without the flag the patched server is the stock one: same tokens, same log-probabilities
to the last digit, same fields.

Both run from the pinned wheel's binaries on this machine, one after the other. On a CPU without
AVX-512, or with AMX and in float32, stock 0.21.0 cannot run a MoE model at all: it gets the one
line that lets it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from engines import seeded_prompts
from pool import CONFIGURATIONS, count_start
from server_fixture import OPTIONS, SERVER_ENV

from vllm_r3.demo.serve import Server
from vllm_r3.series.folder import read_series
from vllm_r3.series.pinned_wheel import pinned_wheel

BROKEN_SILU = "lambda x: SiluAndMul(compile_native=False).forward_native(x)"
VARYING = ("id", "request_id", "system_fingerprint", "created")


def steady(answer: Any) -> Any:
    """The answer without ids and times, which differ between any two runs."""
    if isinstance(answer, list):
        return [steady(item) for item in answer]
    if isinstance(answer, dict):
        return {k: None if k in VARYING else steady(v) for k, v in answer.items()}
    return answer


def joined(chunks: list[dict]) -> dict:
    """A stream's fields and what they add up to: a slow reader gets fewer, longer chunks."""
    choices = [c for chunk in chunks for c in chunk["choices"]]
    texts = [c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices]
    return {
        "text": "".join(texts),
        "token_ids": [t for c in choices for t in c.get("token_ids") or []],
        "fields": sorted({k for chunk in chunks for k in chunk}),
        "choice fields": sorted({k for c in choices for k in c}),
        "last": steady(chunks[-1]),
    }


def read(body: bytes) -> Any:
    """The comparable part of a JSON or an event-stream answer."""
    if not body.startswith(b"data: "):
        return steady(json.loads(body))
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    return joined([json.loads(event) for event in events[:-1]])


def generate(prompt: list[int], **sampling: object) -> tuple[str, dict]:
    params = {"temperature": 0.0, "max_tokens": 40, "logprobs": 5} | sampling
    return "/inference/v1/generate", {"token_ids": prompt, "sampling_params": params}


def completion(prompt: list[int], **fields: object) -> tuple[str, dict]:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 30, "logprobs": 3}
    return "/v1/completions", body | fields


def chat(text: str, **fields: object) -> tuple[str, dict]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_completion_tokens": 30,
        "logprobs": True,
        "top_logprobs": 3,
    }
    return "/v1/chat/completions", body | fields


def questions() -> list[tuple[str, dict]]:
    short, long, edge = seeded_prompts(81, [9, 150, 32])
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    path, body = generate(edge)
    return [
        *(generate(p) for p in (short, long, edge, long)),
        generate(short, temperature=0.9, seed=5),
        generate(short, stop=["e"], min_tokens=3),
        (path, body | streamed),
        completion(long, return_token_ids=True),
        completion(long, echo=True),
        # which of these share a step is a matter of time, and with it the last digit
        completion([short, edge], n=2, temperature=0.7, seed=6, logprobs=None),
        completion(edge, **streamed),
        chat("Which experts?", return_token_ids=True),
        chat("Which experts?", **streamed),
    ]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned CPU wheel, unpacked and unpatched but for the line that fails where it is used."""
    folder = tmp_path_factory.mktemp("stock")
    with zipfile.ZipFile(pinned_wheel(read_series(None).pin, "cpu")) as wheel:
        wheel.extractall(folder, [n for n in wheel.namelist() if n.startswith("vllm/")])
    assert not (folder / "vllm" / "v1" / "routed_experts.py").exists()
    kernel = folder / "vllm/model_executor/layers/fused_moe/cpu_fused_moe.py"
    before, found, rest = kernel.read_text().partition(BROKEN_SILU)
    assert found
    kernel.write_text(before + "SiluAndMul.forward_native" + rest)
    return folder


def answers(server: Server) -> list[Any]:
    """Ask one server all questions, in order."""
    found = []
    for path, body in questions():
        status, answer = server.request("POST", path, body)
        assert status == 200, answer
        found.append(read(answer))
    return found


def test_answers_without_the_flag_equal_the_unpatched_wheels(off, models, stock, tmp_path):
    assert off.client.post("/reset_prefix_cache").status_code == 200
    ours = answers(off.server)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    options = (*OPTIONS, *CONFIGURATIONS["off"].options)
    env = SERVER_ENV | {"PYTHONPATH": str(stock)}
    server = Server(models("moe"), *options, log_path=tmp_path / "log", vllm=command, env=env)
    with contextlib.ExitStack() as stack:
        with count_start("stock"):
            stack.enter_context(server)
        theirs = answers(server)
    assert len(ours) == len(questions())
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our == their, f"question {number}: {questions()[number]}"
    assert sorted(ours[0]) == ["choices", "kv_transfer_params", "prompt_logprobs", "request_id"]
    assert sorted(ours[0]["choices"][0]) == ["finish_reason", "index", "logprobs", "token_ids"]
