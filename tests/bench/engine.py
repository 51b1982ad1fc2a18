"""What returning routed experts costs the engine: throughput, step time, kernels, calls.

`python -m tests.bench.engine --out DIR --sides off+on,off+stock-off@/tmp/stock` measures
groups of sides, one group after the other. The engines of a group (joined by `+`) all stay on the
GPU and are measured in turn, round by round, so that they meet the same drift of a shared
machine; a group of one has the GPU for itself. Where the host bounds the steps (few layers, small
batches) the sides' processes may run on cores of different speed, which `user_s` shows: compare
calls instead. After every round all values so far are in DIR/engine.json and their medians with
their spread in a small table on stdout, so a run that is killed keeps its whole rounds; `--seconds`
ends it by itself.
A throughput round also tells the seconds until the first token of all requests (`first_token_s`,
from a round of its own), and the CPU seconds and page faults of the side's processes, which show
whether a difference is work, memory or waiting.

`--kernels` counts the kernels and copies of a decode step instead; `--calls` tells the median
microseconds of the engine's own calls in a step (`tests.bench.calls`), and their seconds in a
throughput round. Both run the engine in the side's process.

A side is `off` (server flag off), `on` (flag on, every request returns its rows) or `unasked`
(flag on, requests say return_routed_experts=False). `NAME-off@PATH` or `NAME-on@PATH` runs
another vLLM, found under PATH; `stock-on` has sync scheduling, without which 0.21.0 returns no
rows. `--shape tiny` runs the same on a CPU. Weights are random: no download.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.bench.calls import CallTimes

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

    def __init__(self, side: str, model: str, args: argparse.Namespace) -> None:
        from vllm import LLM

        self.side = side.rpartition("-")[2]
        engine_args: dict[str, Any] = dict(enable_return_routed_experts=self.side != "off")
        if side == "stock-on":
            engine_args["async_scheduling"] = False
        if args.shape == "tiny":
            # given: the CPU build would claim most of the machine's memory
            engine_args.update(enforce_eager=True, max_num_seqs=16, kv_cache_memory_bytes=2**28)
        if args.layers:
            engine_args["hf_overrides"] = dict(num_hidden_layers=args.layers)
        if args.kv_gib:
            # Given, not profiled: the engines of a group start at the same time.
            engine_args.update(
                kv_cache_memory_bytes=int(args.kv_gib * 2**30),
                gpu_memory_utilization=0.1,
                max_num_batched_tokens=8192,
            )
        begin = time.time()
        self.llm = LLM(
            model,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            **engine_args,
        )
        print(f"{side}: started in {time.time() - begin:.0f} s", flush=True)
        self.vocabulary = SHAPES[args.shape]["vocab_size"]
        self.load = LOADS[args.shape]
        if args.requests:
            self.load = (args.requests, *self.load[1:])
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
            # vLLM 0.22 returns the prompt's rows in the same array
            allowed = (generated - 1, generated, prompt + generated - 1)
            if self.side == "on" and (rows is None or rows.shape[0] not in allowed):
                raise SystemExit(f"expected {generated - 1} rows, got {rows}")
            if self.side != "on" and rows is not None:
                raise SystemExit(f"expected no rows, got {rows.shape}")
        return seconds

    def measure(self, quantity: str) -> dict[str, float]:
        """Values of "warm_up", "tokens_per_second", or "step_ms_BATCH"."""
        requests, prompt, generated, _ = self.load
        if quantity == "warm_up":
            return {quantity: self.generate(requests, prompt, 32)}
        if quantity != "tokens_per_second":
            return {quantity: self.step_ms(int(quantity.rpartition("_")[2]))}
        first_token_s = self.generate(requests, prompt, 1)
        before = usage()
        seconds = self.generate(requests, prompt, generated)
        used = {name: value - before[name] for name, value in usage().items()}
        return {quantity: requests * generated / seconds, "first_token_s": first_token_s} | used

    def step_ms(self, batch: int, short: int = 16, long: int = 144) -> float:
        """Milliseconds of one decode step at `batch`, from two lengths of answer."""
        fast = self.generate(batch, 64, short)
        slow = self.generate(batch, 64, long)
        return (slow - fast) / (long - short) * 1e3


def usage() -> dict[str, float]:
    """CPU seconds and minor page faults so far of this process and those it started."""
    total = dict(user_s=0.0, system_s=0.0, minor_faults=0.0)
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            times = process.cpu_times()
            total["user_s"] += times.user
            total["system_s"] += times.system
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            total["minor_faults"] += int(stat.rpartition(")")[2].split()[7])
    return total


def count_kernels(engine: Engine) -> dict[str, float]:
    """Kernels and copies per decode step, from a profile of an in-process engine."""
    from torch.profiler import ProfilerActivity, profile

    counts: dict[str, float] = {}
    for batch in engine.load[3][:2]:
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


def time_calls(engine: Engine, times: CallTimes) -> dict[str, float]:
    """Median microseconds of the engine's calls in decode steps, at each batch.

    And the seconds that all of them take in a throughput round.
    """
    found: dict[str, float] = {}
    requests, prompt, generated, batches = engine.load
    for batch in batches:
        engine.generate(batch, 64, 16)
        times.clear()
        engine.generate(batch, 64, 144)
        found |= {f"{name}_us_{batch}": value for name, value in times.per_step().items()}
    times.clear()
    found["round_s"] = engine.generate(requests, prompt, generated)
    return found | {f"{name}_s": value for name, value in times.totals().items()}


def serve_measurements(side: str, model: str, args: argparse.Namespace) -> None:
    """In a side's own process: measure what is asked on stdin, a line a quantity."""
    answers = os.fdopen(args.answers, "w")
    if args.kernels or args.calls:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    times = CallTimes() if args.calls else None
    engine = Engine(side, model, args)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        if times is not None:
            result = time_calls(engine, times)
        else:
            result = count_kernels(engine) if args.kernels else engine.measure(line.strip())
        print(json.dumps(result), file=answers, flush=True)


class Side:
    """A side's process, seen from the one that asks."""

    def __init__(self, number: int, spec: str, args: argparse.Namespace) -> None:
        self.name, _, path = spec.partition("@")
        self.log = args.out / f"{number}-{self.name}.log"
        env = dict(os.environ)
        if path:
            env["PYTHONPATH"] = f"{path}:{env.get('PYTHONPATH', '')}"
        read, write = os.pipe()
        command = [sys.executable, "-m", "tests.bench.engine", *sys.argv[1:]]
        command += ["--one", self.name, "--answers", str(write)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                ["timeout", "-k", "5", str(args.timeout), *command],
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                start_new_session=True,
                text=True,
            )
        os.close(write)
        self.answers = os.fdopen(read)
        self.result: dict[str, list[float]] = {}

    def read(self) -> str:
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: see {self.log.name}")
        return line

    def ask(self, quantity: str) -> Any:
        assert self.process.stdin is not None
        print(quantity, file=self.process.stdin, flush=True)
        return json.loads(self.read())

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            # its engine too, which would keep the GPU's memory
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measure_rounds(sides: list[Side], args: argparse.Namespace) -> Iterator[int]:
    """Measure the engines of a group in turn, each round in another order.

    Yields the number of each round when its values are in the sides' results.
    """
    for side in sides:
        side.read()
    quantities = ["once"]
    if not (args.kernels or args.calls):
        steps = [f"step_ms_{batch}" for batch in LOADS[args.shape][3]]
        for quantity in ["warm_up", *steps]:
            for side in sides:
                side.ask(quantity)
        quantities = ["tokens_per_second", *steps, *steps]
    for number in range(1 if args.kernels else args.rounds):
        for turn, quantity in enumerate(quantities, start=number):
            for side in sides if turn % 2 else reversed(sides):
                for name, value in side.ask(quantity).items():
                    side.result.setdefault(name, []).append(value)
        yield number + 1


def summarize(sides: list[tuple[str, dict[str, list[float]]]]) -> str:
    """One line a quantity: each side's median and spread, and the ratio to the first side."""
    lines = []
    for quantity in dict.fromkeys(name for _, result in sides for name in result):
        cells = [quantity.ljust(22)]
        first: float | None = None
        for name, result in sides:
            if found := result.get(quantity):
                median = statistics.median(found)
                ratio = f" x{median / first:.4f}" if first else ""
                cells.append(f"{name} {median:.4g} ({min(found):.4g} to {max(found):.4g}){ratio}")
                first = first or median
        lines.append("  ".join(cells))
    return "\n".join(lines)


def write_results(path: Path, found: list[list[dict[str, Any]]]) -> None:
    """Replace the file at once: whoever is killed while writing leaves the last round's."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1))
    part.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sides", default="off,on,off,on")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no round after so many"
    )
    parser.add_argument("--requests", type=int, help="requests of a throughput round")
    parser.add_argument("--layers", type=int, help="run with fewer layers")
    parser.add_argument("--kv-gib", type=float, help="GiB of KV cache of an engine in a group")
    parser.add_argument("--kernels", action="store_true", help="count kernels instead of timing")
    parser.add_argument("--calls", action="store_true", help="time the engine's calls instead")
    parser.add_argument("--timeout", type=int, default=400, help="seconds for one side's process")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = write_config(args.shape, args.out / f"model-{args.shape}")
    if args.one:
        serve_measurements(args.one, model, args)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    name = "kernels" if args.kernels else "calls" if args.calls else "engine"
    deadline = time.monotonic() + args.seconds
    found: list[list[dict[str, Any]]] = []
    failed = False
    for number, group in enumerate(args.sides.split(",")):
        if number and time.monotonic() > deadline:
            print(f"group {group}: not begun, --seconds are over", file=sys.stderr, flush=True)
            break
        sides = [Side(number, spec, args) for spec in group.split("+")]
        found.append([dict(side=side.name, result=side.result) for side in sides])
        try:
            for done in measure_rounds(sides, args):
                write_results(args.out / f"{name}.json", found)
                print(f"{group}: {done} of {args.rounds} rounds, medians so far")
                print(summarize([(side.name, side.result) for side in sides]), flush=True)
                if time.monotonic() > deadline:
                    break
        except (RuntimeError, OSError) as error:
            print(f"group {group}: {error}", file=sys.stderr, flush=True)
            failed = True
        finally:
            for side in sides:
                side.stop()
    single: dict[str, dict[str, list[float]]] = {}
    for group_found in found:
        if len(group_found) == 1:
            for quantity, values in group_found[0]["result"].items():
                result = single.setdefault(group_found[0]["side"], {})
                result.setdefault(quantity, []).extend(values)
    print(summarize(list(single.items())))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
