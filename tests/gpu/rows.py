"""Compare routed-experts rows between runners, CUDA-graph modes and ranks, by value.

`python -m tests.gpu.rows OUT [SUITE…]` makes a small mixture-of-experts model with random
weights and runs the same requests through every configuration of a suite, each engine in a
process of its own, several at a time. Needs the patched vLLM. Each comparison is printed and
added to OUT/rows.json as soon as its engine has ended.

- `exact`: bfloat16, one request at a time, so that all configurations run the same shapes; rows
  must be bit-identical within a family of equal arithmetic (compiled or not, the same graphs).
- `invariant`: bfloat16 with batch-invariant kernels, 256 requests of mixed lengths at once, each
  prompt in one piece; rows must be bit-identical whatever runs beside them, on both runners.
- `values`: float32 without TF32, 256 requests of mixed lengths at once, cold and then warm;
  rows must be those of a float32 Hugging Face forward pass but for near ties. With an offloading
  tier, which must be hit, warm rows are compared with cold ones, too.
- `parallel`: the same through `vllm serve`, with tensor, expert, data, sequence and pipeline
  parallelism.
  Where GPUs are missing all ranks share one (`tests.gpu.shared_gpu`).
- `ray`: the same with both Ray executors, on a Ray that is told of two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.lifecycle_truth import NO_LIMITS, Answer, Truth, compare_runs, judge
from tests.gpu.ray_head import ray_head
from tests.gpu.requests import make_model, make_requests, served_rows

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
RAY_V1 = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}
EAGER = dict(enforce_eager=True)
FULL_GRAPHS = dict(compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"))
PIECEWISE = dict(compilation_config=dict(cudagraph_mode="PIECEWISE"))
UNCACHED = dict(enable_prefix_caching=False)
SYNC = dict(async_scheduling=False)
# batch-invariant kernels are not invariant to where a prompt is cut
WHOLE = UNCACHED | dict(enable_chunked_prefill=False)
NGRAM = dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3))
TP2 = dict(tensor_parallel_size=2)
PP2 = dict(pipeline_parallel_size=2)
DP2 = dict(data_parallel_size=2, api_server_count=1)
EP = dict(enable_expert_parallel=True)
EPLB = dict(
    enable_eplb=True,
    eplb_config='{"num_redundant_experts": 2, "window_size": 20, "step_interval": 20}',
)
RAY = dict(distributed_executor_backend="ray")
# A pool of 6,400 tokens and a tier of 175,000 (or a fifth of it) for requests of 85,000.
OFFLOAD = dict(num_gpu_blocks_override=400, kv_offloading_size=1, disable_log_stats=False)
FULL_TIER = OFFLOAD | dict(kv_offloading_size=0.2)
SIMPLE_TIER = {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}

# suite -> name -> (reference, environment, engine arguments)
Config = tuple[str, dict[str, str], dict[str, Any]]
SUITES: dict[str, dict[str, Config]] = {
    "parallel": {
        "tp1": ("tp1", {}, {}),
        "tp2": ("tp1", {}, TP2),
        "tp2-ep": ("tp1", {}, TP2 | EP),
        "dp2-ep": ("tp1", {}, DP2 | EP),
        "tp2-v2": ("tp1", V2, TP2),
        "tp2-ep-eplb": ("tp1", {}, TP2 | EP | EPLB),
        "dp2-ep-v2": ("tp1", V2, DP2 | EP),
        "dp2": ("tp1", {}, DP2),
        "pp2": ("tp1", {}, PP2),
        "pp2-v2": ("tp1", V2, PP2),
        "pp2-tp2-ep": ("tp1", {}, PP2 | TP2 | EP),
        "tp2-dp2-ep": ("tp1", {}, TP2 | DP2 | EP),
    },
    "ray": {
        "ray": ("ray", {}, RAY),
        "ray-v1-executor": ("ray", RAY_V1, RAY),
        "ray-tp2": ("ray", {}, RAY | TP2),
    },
    "exact": {
        "plain": ("plain", {}, EAGER | UNCACHED | SYNC),
        "v1-compiled": ("v1-compiled", {}, UNCACHED),
        "v1-eager": ("plain", {}, EAGER | UNCACHED),
        "v1-full-graphs": ("v1-full-graphs", {}, FULL_GRAPHS | UNCACHED),
        "v2-eager": ("plain", V2, EAGER | UNCACHED),
        "v2-full-graphs": ("v1-full-graphs", V2, FULL_GRAPHS | UNCACHED),
        "v1-piecewise": ("v1-piecewise", {}, PIECEWISE | UNCACHED),
        "v1-piecewise-sync": ("v1-piecewise", {}, PIECEWISE | UNCACHED | SYNC),
        "v2-piecewise": ("v1-piecewise", V2, PIECEWISE | UNCACHED),
        "v2-compiled": ("v1-compiled", V2, UNCACHED),
    },
    "invariant": {
        "plain": ("plain", INVARIANT, EAGER | WHOLE | SYNC),
        "v1": ("v1", INVARIANT, WHOLE),
        "v2": ("v1", INVARIANT | V2, WHOLE),
        "v1-eager": ("plain", INVARIANT, EAGER | WHOLE),
        "v2-eager": ("plain", INVARIANT | V2, EAGER | WHOLE),
        "v1-full-graphs": ("plain", INVARIANT, FULL_GRAPHS | WHOLE),
        "v2-full-graphs": ("plain", INVARIANT | V2, FULL_GRAPHS | WHOLE),
        "v1-piecewise": ("v1-piecewise", INVARIANT, PIECEWISE | WHOLE),
        "v2-piecewise": ("v1-piecewise", INVARIANT | V2, PIECEWISE | WHOLE),
        "alone": ("plain", INVARIANT, EAGER | WHOLE | SYNC | dict(max_num_seqs=1)),
    },
    "values": {
        "plain": ("plain", {}, EAGER | UNCACHED | SYNC),
        "v1": ("plain", {}, {}),
        "v1-sync": ("plain", {}, SYNC),
        "v1-piecewise": ("plain", {}, PIECEWISE),
        "v1-full-graphs": ("plain", {}, FULL_GRAPHS),
        "v1-preempting": ("plain", {}, dict(num_gpu_blocks_override=400)),
        "v1-small-chunks": ("plain", {}, dict(max_num_batched_tokens=96)),
        "v1-ngram": ("plain", {}, NGRAM),
        "v2": ("plain", V2, {}),
        "v2-piecewise": ("plain", V2, PIECEWISE),
        "v2-eager": ("plain", V2, EAGER),
        "v2-preempting": ("plain", V2, dict(num_gpu_blocks_override=400)),
        "v1-offload": ("plain", {}, OFFLOAD),
        "v2-offload": ("plain", V2, OFFLOAD),
        "v1-offload-full": ("plain", {}, FULL_TIER),
        "v1-simple-offload": ("plain", SIMPLE_TIER, OFFLOAD),
        "v2-simple-offload": ("plain", SIMPLE_TIER | V2, OFFLOAD),
    },
}
COMMON = dict(
    max_model_len=1024,
    max_num_batched_tokens=1024,
    max_num_seqs=64,
    # the memory is given, not profiled: engines that start at a time would disturb each other
    gpu_memory_utilization=0.02,
    kv_cache_memory_bytes=2**30,
    enable_return_routed_experts=True,
    seed=0,
)


def ranks(suite: str, name: str) -> int:
    args = SUITES[suite][name][2]
    kinds = ("tensor", "data", "pipeline")
    return math.prod(args.get(f"{kind}_parallel_size", 1) for kind in kinds)


def num_requests(suite: str, name: str) -> int:
    if suite == "exact" or name == "alone":
        return 32
    if suite == "parallel":
        return 48 if ranks(suite, name) > 2 else 128
    return 256


def run_offline(suite: str, name: str, args: dict[str, Any], model: str, out: str) -> None:
    """Run a suite's requests twice and save tokens and rows."""
    from vllm import LLM, SamplingParams

    begin = time.time()
    llm = LLM(model, **args)
    print(f"started in {time.time() - begin:.0f} s", flush=True)
    begin = time.time()
    requests = make_requests()[: num_requests(suite, name)]
    saved: dict[str, np.ndarray] = {}
    numbers = list(range(len(requests)))
    for turn in range(2):
        params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for _, n in requests]
        prompts = [dict(prompt_token_ids=prompt) for prompt, _ in requests]
        if suite == "exact":
            pairs = zip(prompts, params, strict=True)
            outputs = [llm.generate([p], [s], use_tqdm=False)[0] for p, s in pairs]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        for i, output in zip(numbers, outputs, strict=True):
            completion = output.outputs[0]
            saved[f"tokens{turn}_{i}"] = np.array(
                list(output.prompt_token_ids) + list(completion.token_ids)
            )
            saved[f"rows{turn}_{i}"] = np.concatenate(
                [output.prompt_routed_experts, completion.routed_experts]
            )
        # last in, first out: a tier that holds a part of all must be hit, too
        numbers.reverse()
        requests.reverse()
    if "kv_offloading_size" in args:
        wanted = ("vllm:external_prefix_cache", "vllm:routed_experts", "vllm:num_preempt")
        metrics = {m.name: m.value for m in llm.get_metrics() if m.name.startswith(wanted)}
        print(json.dumps(metrics), flush=True)
        saved["external_hits"] = np.array(metrics["vllm:external_prefix_cache_hits"])
    np.savez(out, **saved)
    print(f"ran in {time.time() - begin:.0f} s", flush=True)


def answers_of(saved: Path) -> dict[str, Answer]:
    """The answers of a run by turn and request; where a prompt ended is not kept."""
    with np.load(saved) as arrays:
        names = [name.removeprefix("rows") for name in arrays if name.startswith("rows")]
        pairs = {name: (arrays[f"tokens{name}"], arrays[f"rows{name}"]) for name in names}
    return {name: Answer(tokens, rows, len(tokens)) for name, (tokens, rows) in pairs.items()}


def external_hits(saved: Path) -> int | None:
    """Tokens that a run loaded from its offloading tier, if it had one."""
    with np.load(saved) as arrays:
        return int(arrays["external_hits"]) if "external_hits" in arrays else None


def arguments(suite: str, name: str, num_gpus: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Environment and engine arguments of a configuration on this host."""
    _, env, args = SUITES[suite][name]
    env, args = dict(env), COMMON | args
    if suite in ("parallel", "ray"):
        # few graphs: capturing one costs time slices where ranks share a GPU, and padding more
        args["compilation_config"] = dict(cudagraph_capture_sizes=[1, 8, 16, 32, 64])
    if suite in ("exact", "invariant"):
        args["dtype"] = "bfloat16"
    else:
        args["dtype"] = "float32"
        env["TRITON_F32_DEFAULT"] = "ieee"
    if 0 < num_gpus < ranks(suite, name):
        from tests.gpu import shared_gpu

        env |= shared_gpu.ENVIRONMENT
        args = shared_gpu.ARGUMENTS | args
        if library := os.environ.get("R3_SHARED_GPU_NCCL"):
            env |= {"LD_PRELOAD": library, "VLLM_NCCL_SO_PATH": library}
    return env, args


def run_config(
    suite: str, name: str, model: Path, work: Path, out: Path, num_gpus: int, limit: int
) -> int:
    env, args = arguments(suite, name, num_gpus)
    command = ["timeout", "-k", "5", str(limit), sys.executable, "-m", "tests.gpu.rows"]
    command += [str(out), suite, "--run", name, "--model", str(model)]
    command += ["--result", str(work / f"{suite}-{name}.npz"), "--args", json.dumps(args)]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(out / f"{suite}-{name}.log", "w"))
        if suite == "ray":
            env = stack.enter_context(ray_head(num_gpus=2, num_cpus=2, environment=env))
        return subprocess.run(
            command, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT
        ).returncode


class Report:
    """What was found, written again after every comparison."""

    def __init__(
        self, out: Path, work: Path, model: Path, jobs: list[tuple[str, str]], device: str
    ) -> None:
        self.out, self.work, self.model, self.jobs, self.device = out, work, model, jobs, device
        self.lock = threading.Lock()
        self.truth: Truth | None = None
        self.found: dict[str, Any] = {}
        self.waiting: dict[str, set[str]] = {}

    def add(self, suite: str, name: str, code: int) -> None:
        """Note how an engine ended, and compare what can be compared now."""
        with self.lock:
            self.found[f"{suite}/{name}"] = dict(exit=code)
            self.waiting.setdefault(suite, set()).add(name)
            for ready in sorted(self.waiting[suite]):
                reference = SUITES[suite][ready][0]
                if (suite, reference) not in self.jobs or f"{suite}/{reference}" in self.found:
                    self.waiting[suite].discard(ready)
                    self.compare(suite, ready)
            (self.out / "rows.json").write_text(json.dumps(self.found, indent=1))

    def compare(self, suite: str, name: str) -> None:
        entry = self.found[f"{suite}/{name}"]
        path = self.work / f"{suite}-{name}.npz"
        if path.exists():
            try:
                answers = answers_of(path)
                found = list(answers.values())
                reference = self.work / f"{suite}-{SUITES[suite][name][0]}.npz"
                if reference.exists():
                    others = answers_of(reference)
                    other = [others[number] for number in answers]
                    entry["reference"] = compare_runs(found, other, NO_LIMITS)
                hits = external_hits(path)
                if hits is not None:
                    cold = [answers["0" + number[1:]] for number in answers]
                    entry["warm"] = compare_runs(found, cold, NO_LIMITS)
                    entry["external_hits"] = hits
                    if not hits:
                        raise ValueError("the tier was never hit")
                self.truth = self.truth or Truth(self.model, self.device)
                entry["oracle"] = judge(self.truth, found, NO_LIMITS)
                if entry["oracle"]["problems"]:
                    entry["error"] = "; ".join(entry["oracle"]["problems"])
            except Exception as error:
                entry["error"] = f"{type(error).__name__}: {error}"
        print(f"{suite}/{name}", json.dumps(entry), flush=True)


def main(out: Path, suites: list[str], at_once: int, limit: int, only: str) -> int:
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    model = work / "model"
    if not model.exists():
        # In a process of its own: torch threads must not be there when engines fork.
        command = [sys.executable, "-m", "tests.gpu.rows", str(out), "--model", str(model)]
        subprocess.run(command, check=True)
    listed = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True).stdout
    num_gpus = len(listed.splitlines())
    jobs = [(s, n) for s in suites for n in SUITES[s] if not only or n in only.split(",")]
    report = Report(out, work, model, jobs, "cuda" if num_gpus else "cpu")

    def run(suite: str, name: str) -> int:
        begin = time.time()
        code = run_config(suite, name, model, work, out, num_gpus, limit)
        print(f"{suite}/{name}: exit {code} after {time.time() - begin:.0f} s", flush=True)
        report.add(suite, name, code)
        return code

    with ThreadPoolExecutor(at_once) as pool:
        codes = list(pool.map(lambda job: run(*job), jobs))
    failed = [entry for entry in report.found.values() if entry["exit"] or "error" in entry]
    return int(bool(failed) or any(codes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--at-once", type=int, default=4, help="engines that run at the same time")
    parser.add_argument("--limit", type=int, default=240, help="seconds for one engine")
    parser.add_argument("--only", default="", help="names of configurations, by commas")
    for hidden in ("--run", "--model", "--result", "--args"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        [suite], engine_args = given.suites, json.loads(given.args)
        if suite == "parallel":
            for key, value in engine_args.items():
                if isinstance(value, dict):
                    engine_args[key] = json.dumps(value)
            served_rows(engine_args, given.model, given.result, num_requests(suite, given.run))
        else:
            run_offline(suite, given.run, engine_args, given.model, given.result)
    elif given.model:
        make_model(Path(given.model))
    else:
        sys.exit(
            main(given.out, given.suites or list(SUITES), given.at_once, given.limit, given.only)
        )
