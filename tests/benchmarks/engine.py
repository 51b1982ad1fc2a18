"""What returning routed experts costs the engine: throughput, step time, kernels.

`python -m tests.benchmarks.engine --out DIR --sides off,on,off,on` starts one engine a
side, one after the other (`--gpus 2`: two at a time), so that both sides meet the same drift of
a shared machine; each measures several rounds, and medians with their spread go into
DIR/engine.json and a small table on stdout. A side is `off` (server flag off), `on` (flag on,
every request returns its rows) or `unasked` (flag on, requests say return_routed_experts=False);
`NAME@PATH` runs a side on another vLLM, found under PATH, such as the stock wheel.
`--shape tiny` runs the same on a CPU. Weights are random: no download.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # Qwen3-30B-A3B
    "qwen3-30b-a3b": dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "tiny": dict(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=32,
    ),
}  # fmt: skip
# shape -> requests, prompt tokens, generated tokens of a throughput round; step batches
LOADS = {
    "qwen3-30b-a3b": (256, 512, 512, (1, 32, 256)),
    "tiny": (16, 64, 32, (1, 8)),
}


def write_config(shape: str, directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    config = dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", decoder_sparse_step=1,
        mlp_only_layers=[], norm_topk_prob=True, hidden_act="silu", max_position_embeddings=40960,
        rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, torch_dtype="bfloat16",
        attention_bias=False, sliding_window=None, use_sliding_window=False, max_window_layers=48,
    ) | SHAPES[shape]  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


class Engine:
    """One engine of one side, and what can be measured with it."""

    def __init__(self, side: str, shape: str, model: str, layers: int | None) -> None:
        from vllm import LLM

        self.side = side
        args: dict[str, Any] = dict(enable_return_routed_experts=side in ("on", "unasked"))
        if os.environ.get("R3_BENCH_SYNC"):
            args["async_scheduling"] = False
        if shape == "tiny":
            args.update(enforce_eager=True, max_num_seqs=16)
        if layers:
            args["hf_overrides"] = dict(num_hidden_layers=layers)
        begin = time.time()
        self.llm = LLM(
            model,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            **args,
        )
        print(f"{side}: started in {time.time() - begin:.0f} s", flush=True)
        self.vocabulary = SHAPES[shape]["vocab_size"]
        self.round = 0

    def generate(self, requests: int, prompt: int, generated: int) -> float:
        """Seconds to answer `requests` distinct prompts; checks that rows come."""
        import numpy as np
        from vllm import SamplingParams

        self.round += 1
        rng = np.random.default_rng(self.round)
        prompts = [
            dict(prompt_token_ids=rng.integers(0, self.vocabulary, prompt).tolist())
            for _ in range(requests)
        ]
        params = SamplingParams(
            max_tokens=generated, ignore_eos=True, temperature=1.0, detokenize=False
        )
        if self.side == "unasked":
            params.return_routed_experts = False
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        for output in outputs:
            rows = output.outputs[0].routed_experts
            if self.side == "on" and rows.shape[0] not in (generated - 1, generated):
                raise SystemExit(f"expected {generated - 1} rows, got {rows.shape}")
            if self.side in ("off", "unasked") and rows is not None:
                raise SystemExit(f"expected no rows, got {rows.shape}")
        return seconds

    def step_ms(self, batch: int, short: int = 16, long: int = 144) -> float:
        """Milliseconds of one decode step at `batch`, from two lengths of answer."""
        fast = self.generate(batch, 64, short)
        slow = self.generate(batch, 64, long)
        return (slow - fast) / (long - short) * 1e3


def measure(
    side: str, shape: str, model: str, rounds: int, layers: int | None
) -> dict[str, list[float]]:
    engine = Engine(side, shape, model, layers)
    requests, prompt, generated, batches = LOADS[shape]
    engine.generate(requests, prompt, 32)
    result: dict[str, list[float]] = {}
    for _ in range(rounds):
        seconds = engine.generate(requests, prompt, generated)
        result.setdefault("tokens_per_second", []).append(requests * generated / seconds)
    for batch in batches:
        engine.step_ms(batch)
        result[f"step_ms_{batch}"] = [engine.step_ms(batch) for _ in range(2 * rounds + 1)]
    return result


def count_kernels(side: str, shape: str, model: str, layers: int | None) -> dict[str, float]:
    """Kernels and copies per decode step, from a profile of an in-process engine."""
    from torch.profiler import ProfilerActivity, profile

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = Engine(side, shape, model, layers)
    counts: dict[str, float] = {}
    for batch in (1, 32):
        engine.generate(batch, 64, 16)
        totals = []
        for generated in (16, 48):
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                engine.generate(batch, 64, generated)
            names = [event.name for event in profiler.events() if event.device_type.name == "CUDA"]
            copies = sum("Memcpy" in name or "Memset" in name for name in names)
            totals.append((len(names) - copies, copies, sum("_snapshot" in name for name in names)))
        for index, what in enumerate(("kernels", "copies", "snapshots")):
            counts[f"{what}_per_step_{batch}"] = (totals[1][index] - totals[0][index]) / 32
    return counts


def summarize(runs: list[dict[str, Any]]) -> str:
    """One line a quantity: each side's median and spread, and the ratio to the first side."""
    sides = list(dict.fromkeys(run["side"] for run in runs))
    values: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for quantity, found in run["result"].items():
            values.setdefault(quantity, {}).setdefault(run["side"], []).extend(
                found if isinstance(found, list) else [found]
            )
    lines = []
    for quantity, by_side in values.items():
        cells = [quantity.ljust(22)]
        first = statistics.median(by_side[sides[0]]) if sides[0] in by_side else None
        for side in sides:
            if side in by_side:
                found = by_side[side]
                median = statistics.median(found)
                cells.append(
                    f"{side} {median:.4g} ({min(found):.4g} to {max(found):.4g})"
                    + (f" x{median / first:.4f}" if first and side != sides[0] else "")
                )
        lines.append("  ".join(cells))
    return "\n".join(lines)


def run_side(args: argparse.Namespace, number: int, side: str) -> None:
    """Measure one side in a process of its own, on the GPU of its place in the wave."""
    # A side that fails must not be reported by what an earlier run left in the folder.
    (args.out / f"{number}.json").unlink(missing_ok=True)
    name, _, path = side.partition("@")
    env = dict(os.environ)
    if args.gpus > 1:
        env["CUDA_VISIBLE_DEVICES"] = str(number % args.gpus)
    if path:
        env["PYTHONPATH"] = f"{path}:{env.get('PYTHONPATH', '')}"
    if name.startswith("stock"):
        env["R3_BENCH_SYNC"] = "1"
    command = ["timeout", str(args.timeout), sys.executable, "-m", "tests.benchmarks.engine"]
    command += ["--out", str(args.out), "--shape", args.shape, "--rounds", str(args.rounds)]
    command += ["--one", name.rpartition("-")[2], "--number", str(number)]
    command += ["--layers", str(args.layers)] if args.layers else []
    command += ["--kernels"] if args.kernels else []
    with open(args.out / f"{number}-{name}.log", "w") as log:
        code = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT).returncode
    print(f"{name}: exit {code}, log {number}-{name}.log", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sides", default="off,on,off,on")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, help="run with fewer layers")
    parser.add_argument("--kernels", action="store_true", help="count kernels instead of timing")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one side")
    parser.add_argument("--gpus", type=int, default=1, help="sides that run at the same time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = write_config(args.shape, args.out / f"model-{args.shape}")
    if args.one:
        if args.kernels:
            result: dict = count_kernels(args.one, args.shape, model, args.layers)
        else:
            result = measure(args.one, args.shape, model, args.rounds, args.layers)
        (args.out / f"{args.number}.json").write_text(json.dumps(result))
        return 0
    sides = args.sides.split(",")
    with ThreadPoolExecutor(args.gpus) as pool:
        # Sides in step on the GPUs: all of a wave meet the same drift.
        for first in range(0, len(sides), args.gpus):
            wave = list(enumerate(sides[first : first + args.gpus], first))
            list(pool.map(lambda side: run_side(args, *side), wave))
    runs = []
    for number, side in enumerate(sides):
        found = args.out / f"{number}.json"
        if found.exists():
            runs.append(dict(side=side.partition("@")[0], result=json.loads(found.read_text())))
    (args.out / ("kernels.json" if args.kernels else "engine.json")).write_text(
        json.dumps(runs, indent=1)
    )
    print(summarize(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
