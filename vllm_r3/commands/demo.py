"""`vllm-r3 demo`: serve a tiny mixture-of-experts model and check every row it returns.

Results (shapes, first rows, what was compared) on stdout, progress on stderr. Needs the
patched vLLM, torch and transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_r3.errors import R3Error

PROMPT = (
    "A router sends every token to a few experts. Which ones did it choose for this line, "
    "layer by layer, and will the trainer choose the same?"
)
MAX_TOKENS = 32
SHOWN_ROWS = 3
ENGINE_ENV = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
ENGINE_OPTIONS = (
    "--enable-return-routed-experts",
    "--enforce-eager",
    *("--dtype", "float32"),
    *("--block-size", "32"),
    *("--max-model-len", "512"),
    *("--seed", "0"),
)

TIMES = ("cold", "again")

Step = Callable[[str], None]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `demo`."""
    parser = subparsers.add_parser(
        "demo", help="serve a tiny MoE model and compare every returned row with an oracle"
    )
    parser.add_argument(
        "--model",
        default="moe",
        metavar="KIND",
        help="which tiny model (default: moe; also dense-between, wide, glm4, …)",
    )
    parser.add_argument("--port", type=int, help="loopback port (default: a free one)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave the model and the server's log here"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the whole demo; 0 only if every row agrees."""
    with _directory(args.keep) as directory:
        return demo(args.model, directory, args.port)


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="vllm-r3-demo-") as made:
        yield Path(made)


def _steps(total: int) -> Step:
    """A printer of `n of N` lines with the seconds since the start."""
    began, count = time.monotonic(), iter(range(1, total + 1))

    def step(text: str) -> None:
        seconds = time.monotonic() - began
        print(f"{next(count)} of {total}  {text}  [{seconds:.0f} s]", file=sys.stderr, flush=True)

    return step


def _note(text: str) -> None:
    print(f"        {text}", file=sys.stderr, flush=True)


def demo(kind: str, directory: Path, port: int | None = None) -> int:
    """Make the model, serve it, ask twice, compare, replay. Raises R3Error where a step fails."""
    step = _steps(7)
    step(f"write the tiny model {kind!r}")
    _quiet_transformers()
    from vllm_r3.demo.serve import Server
    from vllm_r3.demo.tiny_models import write_model
    from vllm_r3.replay.replay import replay

    model = write_model(kind, directory / "model")
    prompt = _token_ids(model)
    step("start vllm serve --enable-return-routed-experts on the loopback")
    log = directory / "server.log"
    server = Server(model, *ENGINE_OPTIONS, log_path=log, port=port, env=ENGINE_ENV, progress=_note)
    with server:
        info = server.ask("/routed_experts/info")
        step(f"ask for {MAX_TOKENS} tokens after {len(prompt)}, twice: cold, then cached prompt")
        answers = {name: server.ask("/inference/v1/generate", _body(prompt)) for name in TIMES}
        cached = _cached_tokens(server)
        rows = {name: _read(answer, info, len(prompt)) for name, answer in answers.items()}
        _show(answers["cold"], *rows["cold"])
        step("sample more texts and replay their rows in transformers")
        report = replay(str(model), server.url, dtype="float32", texts=4)
        step("stop the server")
    step("run the same tokens through the float32 oracle")
    cells = {name: _compare(model, prompt, answers[name], *rows[name], info) for name in TIMES}
    step("report")
    for name, (count, of) in cells.items():
        print(f"{name:<6} {count} rows, {of} cells (token, layer): all agree with the oracle")
    print(f"cached {cached} prompt tokens of the second request came from the prefix cache")
    print("\n".join(report.lines()))
    return _verdict(cached, report.passed)


def _verdict(cached: int, replayed: bool) -> int:
    """0, or R3Error where all rows agree but the demo does not show what it should."""
    if not cached:
        raise R3Error("the second request: expected a prefix-cache hit, the server counted none")
    if not replayed:
        raise R3Error("replay: expected no larger mismatch than with the trainer's own routing")
    return 0


def _quiet_transformers() -> None:
    """No progress bars between our lines; a missing library names its extra."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise R3Error(
            f"the demo needs torch and transformers ({error}); install vllm-r3[demo]"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _token_ids(model: Path) -> list[int]:
    from transformers import AutoTokenizer

    return [int(i) for i in AutoTokenizer.from_pretrained(model)(PROMPT)["input_ids"]]


def _body(prompt: list[int]) -> dict[str, Any]:
    sampling = {"max_tokens": MAX_TOKENS, "logprobs": 1, "temperature": 0.0}
    return {"token_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}


def _read(answer: dict[str, Any], info: dict[str, Any], num_prompt: int) -> tuple[Any, Any]:
    from vllm_r3.contract import read_split_answer

    prompt_rows, choices = read_split_answer(answer, info, num_prompt)
    return prompt_rows, choices[0]


def _show(answer: dict[str, Any], prompt_rows: Any, rows: Any) -> None:
    """Print shapes and first rows as a trainer sees them."""
    print(f"routed_experts_meta            {answer['routed_experts_meta']}")
    print(f"prompt_routed_experts          {prompt_rows.dtype} {prompt_rows.shape}")
    print(f"choices[0].routed_experts      {rows.dtype} {rows.shape}")
    print(f"choices[0].token_ids           {len(answer['choices'][0]['token_ids'])} tokens")
    for number, row in enumerate(prompt_rows[:SHOWN_ROWS]):
        print(f"row {number}, layer 0, 1, …: {row.tolist()}")


def _compare(
    model: Path,
    prompt: list[int],
    answer: dict[str, Any],
    prompt_rows: Any,
    rows: Any,
    info: dict[str, Any],
) -> tuple[int, int]:
    """Compare one answer's rows with the oracle; return rows and cells compared."""
    import numpy as np

    from vllm_r3.checks.rows import compare_rows
    from vllm_r3.replay.oracle import Oracle

    oracle = Oracle(str(model))
    if oracle.moe_layers != info["moe_layers"]:
        raise R3Error(f"moe_layers: expected {oracle.moe_layers}, got {info['moe_layers']}")
    truth = oracle.truth([*prompt, *answer["choices"][0]["token_ids"]])
    found = np.concatenate([prompt_rows, rows])
    done = compare_rows(
        found, truth.rows, oracle.moe_layers, info["num_experts"], "answer", truth.margins
    )
    return done.rows, done.cells


def _cached_tokens(server: Any) -> int:
    """Prompt tokens that the prefix cache has served, from the Prometheus endpoint."""
    _, text = server.request("GET", "/metrics")
    for line in text.decode().splitlines():
        if line.startswith("vllm:prefix_cache_hits_total"):
            return int(float(line.rsplit(" ", 1)[1]))
    raise R3Error("/metrics: expected vllm:prefix_cache_hits_total, found none")
