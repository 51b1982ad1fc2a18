"""Compare routed-experts rows between runners, CUDA-graph modes and GPUs, by value.

`python -m tests.gpu.rows OUT [SUITE…]` makes a small mixture-of-experts model with random
weights and runs the same requests through every configuration of a suite, each engine in a
process of its own, as many at once as there are GPUs. Needs the patched vLLM.

- `exact`: one request at a time, so that all configurations run the same shapes; rows must
  be bit-identical within a family of equal arithmetic (compiled or not).
- `batched`: 256 requests of mixed lengths, cold and warm, compared with a run of the same
  family where the tokens agree, and with a float32 Hugging Face forward pass.
- `parallel`: tensor, expert and data parallel through `vllm serve`, against one GPU.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.requests import make_model, make_requests, served_rows

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
EAGER = dict(enforce_eager=True)
FULL_GRAPHS = dict(compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"))
UNCACHED_SYNC = dict(async_scheduling=False, enable_prefix_caching=False)
NGRAM = dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3))

# suite -> name -> (reference, environment, engine arguments, GPUs)
Config = tuple[str, dict[str, str], dict[str, Any], int]
SUITES: dict[str, dict[str, Config]] = {
    "exact": {
        "plain": ("plain", {}, EAGER | UNCACHED_SYNC, 1),
        "v1-eager": ("plain", {}, EAGER | dict(enable_prefix_caching=False), 1),
        "v1-full-graphs": ("plain", {}, FULL_GRAPHS | dict(enable_prefix_caching=False), 1),
        "v2-eager": ("plain", V2, EAGER | dict(enable_prefix_caching=False), 1),
        "v2-full-graphs": ("plain", V2, FULL_GRAPHS | dict(enable_prefix_caching=False), 1),
        "v1-compiled": ("v1-compiled", {}, dict(enable_prefix_caching=False), 1),
        "v1-piecewise-sync": (
            "v1-compiled",
            {},
            UNCACHED_SYNC | dict(compilation_config=dict(cudagraph_mode="PIECEWISE")),
            1,
        ),
        "v2-compiled": ("v1-compiled", V2, dict(enable_prefix_caching=False), 1),
    },
    "batched": {
        "v1": ("v1", {}, {}, 1),
        "v2": ("v1", V2, {}, 1),
        "v2-preempting": ("v1", V2, dict(num_gpu_blocks_override=400), 1),
        "v1-ngram": ("v1", {}, NGRAM, 1),
    },
    "parallel": {
        "tp1": ("tp1", {}, {}, 1),
        "tp2": ("tp1", {}, {"--tensor-parallel-size": 2}, 2),
        "tp2-ep": ("tp1", {}, {"--tensor-parallel-size": 2, "--enable-expert-parallel": None}, 2),
        "dp2-ep": ("tp1", {}, {"--data-parallel-size": 2, "--enable-expert-parallel": None}, 2),
    },
}
DENSE_LAYER = 2


def run_offline(suite: str, name: str, model: str, out: str) -> None:
    """Run a suite's requests twice and save tokens and rows."""
    from vllm import LLM, SamplingParams

    _, _, args, _ = SUITES[suite][name]
    begin = time.time()
    llm = LLM(
        model,
        **dict(
            dtype="bfloat16",
            max_model_len=1024,
            max_num_batched_tokens=1024,
            max_num_seqs=64,
            gpu_memory_utilization=0.3,
            enable_return_routed_experts=True,
            seed=0,
        )
        | args,
    )
    started = time.time()
    requests = make_requests()[: 40 if suite == "exact" else None]
    saved: dict[str, np.ndarray] = {}
    for turn in range(2):
        params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for _, n in requests]
        prompts = [dict(prompt_token_ids=prompt) for prompt, _ in requests]
        if suite == "exact":
            pairs = zip(prompts, params, strict=True)
            outputs = [llm.generate([p], [s], use_tqdm=False)[0] for p, s in pairs]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        for i, output in enumerate(outputs):
            completion = output.outputs[0]
            saved[f"tokens{turn}_{i}"] = np.array(
                list(output.prompt_token_ids) + list(completion.token_ids)
            )
            saved[f"rows{turn}_{i}"] = np.concatenate(
                [output.prompt_routed_experts, completion.routed_experts]
            )
    np.savez(out, **saved)
    print(
        f"{name}: started in {started - begin:.0f} s, ran in {time.time() - started:.0f} s",
        flush=True,
    )


def compare_with_reference(found: dict, reference: dict) -> dict[str, int]:
    """Rows that are equal, of those where all tokens up to them are the same."""
    result = dict(rows=0, equal=0, other_tokens=0, differing_cells=0, cells=0)
    for key in found:
        if not key.startswith("rows"):
            continue
        tokens, expected_tokens = found["tokens" + key[4:]], reference["tokens" + key[4:]]
        same = int(
            (tokens[: len(expected_tokens)] == expected_tokens[: len(tokens)]).cumprod().sum()
        )
        result["other_tokens"] += same < len(expected_tokens)
        length = min(same, len(found[key]), len(reference[key]))
        a, b = found[key][:length], reference[key][:length]
        result["rows"] += length
        result["equal"] += int((a == b).all(axis=(1, 2)).sum())
        cells = (np.sort(a, -1) == np.sort(b, -1)).all(-1)
        result["differing_cells"] += int((~cells).sum())
        result["cells"] += cells.size
    return result


def compare_with_oracle(oracle: Any, found: dict, requests: int = 40) -> dict[str, float]:
    """Compare with float32: all cells, and the first MoE layer, where little has added up."""
    cells = differing = repeated = first = first_differing = 0
    widest = 0.0
    for i in range(requests):
        tokens, rows = found[f"tokens1_{i}"], found[f"rows1_{i}"]
        if len(rows) != len(tokens) - 1:
            raise SystemExit(f"request {i}: {len(rows)} rows for {len(tokens)} tokens")
        truth = oracle.truth(tokens.tolist())
        layers = [layer for layer in range(rows.shape[1]) if layer != DENSE_LAYER]
        ordered = np.sort(rows[:, layers].astype(int), -1)
        repeated += int((np.diff(ordered, axis=-1) == 0).any(-1).sum())
        bad = (ordered != np.sort(truth.rows[:, layers], -1)).any(-1)
        widest = max(widest, float((truth.margins[:, 0] * bad[:, 0]).max(initial=0.0)))
        cells, differing = cells + bad.size, differing + int(bad.sum())
        first, first_differing = first + len(bad), first_differing + int(bad[:, 0].sum())
        if rows[:, DENSE_LAYER].any():
            raise SystemExit(f"request {i}: the dense layer is not zero")
    return dict(
        share=round(differing / cells, 5),
        first_layer_share=round(first_differing / first, 5),
        first_layer_widest_margin=round(widest, 5),
        repeated=repeated,
    )


def run_config(suite: str, name: str, model: Path, work: Path, out: Path, gpus: list[str]) -> int:
    env = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(gpus)) | SUITES[suite][name][1]
    command = [
        sys.executable,
        "-m",
        "tests.gpu.rows",
        "--run",
        suite,
        name,
        str(model),
        str(work / f"{suite}-{name}"),
    ]
    with open(out / f"{suite}-{name}.log", "w") as log:
        return subprocess.run(
            ["timeout", "170", *command], env=env, stdout=log, stderr=subprocess.STDOUT
        ).returncode


def main(out: Path, suites: list[str]) -> int:
    work = Path("/tmp/rows")
    work.mkdir(parents=True, exist_ok=True)
    model = work / "model"
    if not model.exists():
        # In a process of its own: torch threads must not be there when engines fork.
        subprocess.run([sys.executable, "-m", "tests.gpu.rows", "--model", str(model)], check=True)
    available: queue.Queue[str] = queue.Queue()
    num_gpus = len(
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    )
    for gpu in range(num_gpus):
        available.put(str(gpu))

    def run(suite: str, name: str) -> int:
        gpus = [available.get() for _ in range(SUITES[suite][name][3])]
        code = run_config(suite, name, model, work, out, gpus)
        for gpu in gpus:
            available.put(gpu)
        print(f"{suite} {name}: exit {code}", flush=True)
        return code

    codes: dict[tuple[str, str], int] = {}
    jobs = [(s, n) for s in suites for n in SUITES[s] if SUITES[s][n][3] <= num_gpus]
    with ThreadPoolExecutor(num_gpus) as pool:
        single = [job for job in jobs if SUITES[job[0]][job[1]][3] == 1]
        codes.update(zip(single, pool.map(lambda job: run(*job), single), strict=True))
    for job in jobs:
        if job not in codes:
            codes[job] = run(*job)

    from vllm_r3.oracle import Oracle

    oracle = Oracle(str(model))
    report: dict[str, Any] = {}
    for (suite, name), code in codes.items():
        label = f"{suite}/{name}"
        if code or codes.get((suite, SUITES[suite][name][0])):
            report[label] = dict(exit=code)
            continue
        found = dict(np.load(work / f"{suite}-{name}.npz"))
        reference = dict(np.load(work / f"{suite}-{SUITES[suite][name][0]}.npz"))
        report[label] = dict(
            reference=compare_with_reference(found, reference),
            oracle=compare_with_oracle(oracle, found),
        )
        print(label, json.dumps(report[label]), flush=True)
    (out / "rows.json").write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--model":
        make_model(Path(sys.argv[2]))
    elif sys.argv[1] == "--run" and sys.argv[2] == "parallel":
        served_rows(SUITES["parallel"][sys.argv[3]][2], sys.argv[4], sys.argv[5])
    elif sys.argv[1] == "--run":
        run_offline(*sys.argv[2:6])
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(SUITES)))
