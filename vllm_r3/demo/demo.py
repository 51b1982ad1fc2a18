"""Serve a tiny mixture-of-experts model and check every row that it returns.

Results (shapes, first rows, what was compared) on stdout, progress on stderr. Needs the patched
vLLM, torch and transformers.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_r3.checks.rows import compare_rows
from vllm_r3.checks.server import hold_form, hold_meta
from vllm_r3.client import ChoiceRoutes, decode_choice
from vllm_r3.demo.serve import Server
from vllm_r3.errors import R3Error

PROMPT = (
    "A router sends every token to a few experts. Which ones did it choose for this line, "
    "layer by layer, and will the trainer choose the same?"
)
MAX_TOKENS = 32
SHOWN_ROWS = 3
# no progress bars between our lines, no look at the network
QUIET_ENV = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
QUIET_ENV["TRANSFORMERS_VERBOSITY"] = "error"
ENGINE_ENV = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENGINE_OPTIONS = (
    *("--enable-return-routed-experts", "--enforce-eager", "--dtype", "float32"),
    *("--block-size", "32", "--max-model-len", "512", "--seed", "0"),
)


def demo(kind: str, port: int | None = None, keep: Path | None = None) -> None:
    """Make a model of `tiny_models.KINDS`, serve it, ask twice, compare, replay.

    The model and the server's log stay in `keep`, where given.

    Raises:
        R3Error: a step fails, a row differs, or the demo does not show what it should.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="vllm-r3-demo-") as made:
            return demo(kind, port, Path(made))
    keep.mkdir(parents=True, exist_ok=True)
    step = _steps(7)
    step(f"write the tiny model {kind!r}")
    os.environ |= QUIET_ENV
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise R3Error(
            f"the demo needs torch and transformers ({error}); install vllm-r3[demo]"
        ) from None
    from vllm_r3.demo.tiny_models import write_model
    from vllm_r3.replay.oracle import Oracle
    from vllm_r3.replay.replay import replay

    model = write_model(kind, keep / "model")
    prompt = AutoTokenizer.from_pretrained(model)(PROMPT)["input_ids"]
    step("start vllm serve --enable-return-routed-experts on the loopback")
    log = keep / "server.log"
    server = Server(model, *ENGINE_OPTIONS, log_path=log, port=port, env=ENGINE_ENV, progress=_note)
    with server:
        info = server.ask("/routed_experts/info")
        print(f"/routed_experts/info           {info}")
        step(f"ask for {MAX_TOKENS} tokens after {len(prompt)}, twice: cold, then cached prompt")
        cold, again = (_ask(server, prompt, info) for _ in range(2))
        cached = _cached_tokens(server)
        _show(cold)
        step("sample more texts and replay their rows in transformers")
        report = replay(str(model), server.url, dtype="float32", texts=4)
        step("stop the server")
    step("run the same tokens through the float32 oracle")
    oracle = Oracle(str(model))
    if oracle.moe_layers != info["moe_layers"]:
        raise R3Error(f"moe_layers: expected {oracle.moe_layers}, got {info['moe_layers']}")
    found = {}
    for name, choice in (("cold", cold), ("again", again)):
        truth = oracle.truth([*prompt, *choice.token_ids])
        found[name] = compare_rows(choice.rows, truth.rows, oracle.shape, "answer", truth.margins)
    step("report")
    for name, done in found.items():
        cells = f"{done.cells} cells (token, layer)"
        print(f"{name:<6} {done.rows} rows, {cells}: all agree with the oracle")
    print(f"cached {cached} prompt tokens of the second request came from the prefix cache")
    print("\n".join(report.lines()))
    if not cached:
        raise R3Error("the second request: expected a prefix-cache hit, the server counted none")
    if not report.passed:
        raise R3Error("replay: expected no larger mismatch than with the trainer's own routing")


def _steps(total: int) -> Callable[[str], None]:
    """Return a printer of `n of N` lines with the seconds since the start."""
    began, count = time.monotonic(), iter(range(1, total + 1))

    def step(text: str) -> None:
        seconds = time.monotonic() - began
        print(f"{next(count)} of {total}  {text}  [{seconds:.0f} s]", file=sys.stderr, flush=True)

    return step


def _note(text: str) -> None:
    print(f"        {text}", file=sys.stderr, flush=True)


def _ask(server: Server, prompt: list[int], info: dict[str, Any]) -> ChoiceRoutes:
    sampling = {"max_tokens": MAX_TOKENS, "logprobs": 1, "temperature": 0.0}
    body = {"token_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
    answer = server.ask("/inference/v1/generate", body)
    hold_meta(answer, info)
    hold_form(answer, "npy", "split", info["dtype"])
    return decode_choice(answer, num_prompt=len(prompt))


def _show(choice: ChoiceRoutes) -> None:
    """Print shapes and first rows as a trainer sees them."""
    prompt, generated = np.split(choice.rows, [choice.count.num_prompt])
    print(f"prompt_routed_experts          {prompt.dtype} {prompt.shape}")
    print(f"choices[0].routed_experts      {generated.dtype} {generated.shape}")
    print(f"choices[0].token_ids           {choice.count.num_generated} tokens")
    for number, row in enumerate(prompt[:SHOWN_ROWS]):
        print(f"row {number}, layer 0, 1, …: {row.tolist()}")


def _cached_tokens(server: Server) -> int:
    """Return how many prompt tokens the prefix cache has served, from the Prometheus endpoint."""
    _, text = server.request("GET", "/metrics")
    found = re.search(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text.decode(), re.MULTILINE)
    if found is None:
        raise R3Error("/metrics: expected vllm:prefix_cache_hits_total, found none")
    return int(float(found.group(1)))
