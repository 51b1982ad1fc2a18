"""Check the rows of request lives that only a GPU can run: drafts, sleep, reloaded weights.

`python -m tests.gpu.lifecycle OUT [CASE…]` writes small models with random weights and runs every
case in a process of its own, several at a time on one GPU. Needs the patched vLLM. Each case
writes OUT/CASE.json as it ends: its rows against a float32 forward pass of Hugging Face, and
whether drafts were accepted and rejected. The parent adds a comparison with the run without
speculation, prints a line a case and keeps OUT/lives.json up to date. Exit 1 if a case failed.

- `plain-*`: no speculation, the reference of the others.
- `eagle*`, `mtp*`, `draft*`: rejected drafts leave nothing, the draft's routers write nowhere.
  Requests run cold, then warm from the prefix cache, some of them ended by a stop token.
- `sleep*`: the same requests before and after level 1, and after level 2 with weights reloaded.
- `reload*`: other weights in place, from files that were replaced: rows are those of the new.

Without a GPU, the CPU build runs the V1 cases but for `sleep*` and `eagle3*` (which stock 0.21.0
does not have there), eager and sync: `VLLM_CPU_KVCACHE_SPACE=1 TORCHDYNAMO_DISABLE=1`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.lifecycle_truth import LIMITS, Answer, Truth, compare_runs, judge, pack, unpack

V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
SYNC = dict(async_scheduling=False)
EAGER = dict(enforce_eager=True)
# without compilation an engine starts in half the time
FULL_GRAPHS = dict(compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"))
SLEEP = dict(enable_sleep_mode=True, kv_cache_memory_bytes=4 * 2**30)
COMMON: dict[str, Any] = dict(
    max_model_len=512,
    max_num_batched_tokens=256,
    max_num_seqs=16,
    block_size=16,
    # the memory is given, not profiled: engines that start at a time would disturb each other
    gpu_memory_utilization=0.02,
    kv_cache_memory_bytes=2**28,
    enable_return_routed_experts=True,
    disable_log_stats=False,
    seed=0,
)
DRAFT_TOKENS = 3
NUM_REQUESTS = 40


@dataclasses.dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        target: the model, by its name in `tests.gpu.lifecycle_models`.
        args: engine arguments on top of COMMON.
        env: environment on top of the caller's.
        draft: method of speculation, and the model that drafts.
        life: what happens to the engine; see LIVES.
    """

    target: str
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    draft: tuple[str, str] | None = None
    life: str = "serve"


EAGLE1, EAGLE3, DRAFT = ("eagle", "eagle"), ("eagle3", "eagle3"), ("draft_model", "draft")
MTP = ("mtp", "glm")
CASES: dict[str, Case] = {
    "plain-moe": Case("moe"),
    "plain-glm": Case("glm"),
    "sleep-v1": Case("moe", SLEEP, life="sleep"),
    "sleep-v2": Case("moe", SLEEP, V2, life="sleep"),
    "reload-v1": Case("moe", life="reload"),
    "reload-v2": Case("moe", FULL_GRAPHS, V2, life="reload"),
    "eagle3-v1": Case("moe", draft=EAGLE3),
    "eagle3-v2": Case("moe", env=V2, draft=EAGLE3),
    "mtp-v1": Case("glm", draft=MTP),
    "mtp-v2": Case("glm", env=V2, draft=MTP),
    "eagle-v1": Case("moe", FULL_GRAPHS, draft=EAGLE1),
    "eagle-v2": Case("moe", FULL_GRAPHS, V2, draft=EAGLE1),
    "eagle3-v1-sync": Case("moe", EAGER | SYNC, draft=EAGLE3),
    "mtp-v1-sync": Case("glm", EAGER | SYNC, draft=MTP),
    "mtp-v1-preempting": Case("glm", EAGER | dict(num_gpu_blocks_override=72), draft=MTP),
    "draft-v1": Case("moe", EAGER | dict(async_scheduling=True), draft=DRAFT),
}
# a case that ends before its rows are compared with these waits for them in the parent
REFERENCE = {"moe": "plain-moe", "glm": "plain-glm"}


def make_requests() -> list[tuple[list[int], int]]:
    """Prompts around block edges and of mixed lengths, some with a shared prefix; max_tokens."""
    rng = np.random.default_rng(11)
    shared = rng.integers(0, 509, 50).tolist()
    edges = [1, 2, 15, 16, 17, 31, 32, 33]
    requests = []
    for i in range(NUM_REQUESTS):
        length = edges[i] if i < len(edges) else int(rng.integers(1, 160))
        prompt = rng.integers(0, 509, length).tolist()
        limit = 1 if i == 9 else int(rng.integers(2, 64))
        requests.append(((shared + prompt) if i % 4 == 3 else prompt, limit))
    return requests


class Running:
    """A started engine and what it has answered so far, by phase."""

    def __init__(self, case: Case, llm: Any, models: Path) -> None:
        self.case, self.llm, self.models = case, llm, models
        self.phases: dict[str, list[Answer]] = {}
        self.cached: dict[str, int] = {}
        self.truths: dict[str, str] = {}
        self.problems: list[str] = []

    def ask(self, phase: str, stops: list[int | None] | None = None, truth: str = "") -> None:
        """Run all requests at once; `stops` are token ids that end them."""
        from vllm import SamplingParams

        requests = make_requests()
        stops = stops or [None] * len(requests)
        greedy: dict[str, Any] = dict(temperature=0, ignore_eos=True)
        params = [
            SamplingParams(max_tokens=n, stop_token_ids=None if s is None else [s], **greedy)
            for (_, n), s in zip(requests, stops, strict=True)
        ]
        prompts = [dict(prompt_token_ids=prompt) for prompt, _ in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        self.cached[phase] = sum(output.num_cached_tokens or 0 for output in outputs)
        self.truths[phase] = truth or self.case.target
        self.phases[phase], stopped = [], 0
        for i, (output, stop) in enumerate(zip(outputs, stops, strict=True)):
            choice = output.outputs[0]
            prompt, rows = output.prompt_routed_experts, choice.routed_experts
            lengths = len(output.prompt_token_ids), len(choice.token_ids) - 1
            if (len(prompt), len(rows)) != lengths:
                found = f"{len(prompt)} + {len(rows)}"
                self.problems.append(f"{phase}, answer {i}: {found} rows, not {lengths}")
            stopped += stop is not None and choice.finish_reason == "stop"
            if stop is not None and stop in choice.token_ids[:-1]:
                self.problems.append(f"{phase}, answer {i}: did not stop at token {stop}")
            tokens = np.array([*output.prompt_token_ids, *choice.token_ids])
            answer = Answer(tokens, np.concatenate([prompt, rows]), lengths[0])
            self.phases[phase].append(answer)
        self.expect("answers ended by a stop token", stopped > 0 or not any(stops))

    def rpc(self, method: str, *args: Any) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]

    def metrics(self) -> dict[str, float]:
        names = {
            "vllm:spec_decode_num_accepted_tokens": "accepted",
            "vllm:spec_decode_num_draft_tokens": "drafted",
            "vllm:num_preemptions": "preemptions",
        }
        found = dict.fromkeys(names.values(), 0.0)
        for metric in self.llm.get_metrics():
            if metric.name in names:
                found[names[metric.name]] += metric.value
        return found

    def expect(self, what: str, is_so: bool) -> None:
        if not is_so:
            self.problems.append(f"expected {what}")


def _stops(answers: list[Answer]) -> list[int | None]:
    """For every third answer that is long enough, a token in its midst."""
    found: list[int | None] = []
    for i, answer in enumerate(answers):
        generated = answer.tokens[answer.prompt_len :]
        found.append(int(generated[5 + i % 4]) if i % 3 == 0 and len(generated) > 12 else None)
    return found


def serve(running: Running) -> None:
    """Cold, then warm; and drafts both accepted and rejected in each."""
    for phase in ("cold", "warm"):
        before = running.metrics()
        stops = _stops(running.phases["cold"]) if phase == "warm" else None
        running.ask(phase, stops)
        after = running.metrics()
        if running.case.draft:
            accepted, drafted = (after[k] - before[k] for k in ("accepted", "drafted"))
            what = f"accepted and rejected drafts in {phase}, got {accepted:.0f} of {drafted:.0f}"
            running.expect(what, 0 < accepted < drafted)
    if "num_gpu_blocks_override" in running.case.args:
        # too few blocks to keep anything for the warm run
        running.expect("preemptions", running.metrics()["preemptions"] > 0)
    else:
        running.expect("prefix-cache hits", running.cached["warm"] > running.cached["cold"])


def _reload(running: Running, path: Path) -> None:
    """As an RL trainer does it on the V1 runner; the V2 runner of 0.21.0 has no such method."""
    if running.case.env.get("VLLM_USE_V2_MODEL_RUNNER"):
        running.rpc("reload_layerwise", str(path))
    else:
        running.rpc("reload_weights")


def sleep(running: Running) -> None:
    """Level 1, then level 2; no prefix survives, and memory is really given back."""
    running.ask("cold")
    running.ask("warm")
    running.expect("prefix-cache hits", running.cached["warm"] > running.cached["cold"])
    enough = running.case.args["kv_cache_memory_bytes"] // 2
    weights = running.rpc("fingerprint")
    for level in (1, 2):
        running.llm.sleep(level=level)
        freed = running.rpc("describe")["freed_bytes"]
        running.expect(f"level {level} to free {enough} bytes, got {freed}", freed > enough)
        if level == 1:
            running.llm.wake_up()
        else:
            running.llm.wake_up(tags=["weights"])
            running.expect("no weights after level 2", running.rpc("fingerprint") != weights)
            _reload(running, running.models / running.case.target)
            running.llm.wake_up(tags=["kv_cache"])
        what = f"the same weights after level {level}"
        running.expect(what, running.rpc("fingerprint") == weights)
        running.ask(f"after-level-{level}")
        cached = running.cached[f"after-level-{level}"]
        what = f"an empty prefix cache after level {level}, got {cached} cached tokens"
        # prompts with a shared prefix hit each other's blocks, as in the first run
        running.expect(what, cached < running.cached["warm"])
        running.ask(f"warm-after-level-{level}")


def reload(running: Running) -> None:
    """Replace the files of the model, reload, drop what the old weights cached."""
    path = Path(running.llm.llm_engine.vllm_config.model_config.model)
    running.ask("cold")
    os.replace(running.models / "other-weights.safetensors", path / "model.safetensors")
    _reload(running, path)
    running.expect("the prefix cache to be reset", bool(running.llm.reset_prefix_cache()))
    running.ask("new-cold", truth="other")
    running.ask("new-warm", truth="other")
    running.expect("prefix-cache hits", running.cached["new-warm"] > running.cached["new-cold"])


LIVES = {"serve": serve, "sleep": sleep, "reload": reload}


def check_description(running: Running, found: dict[str, Any]) -> None:
    """The engine that ran is the one that was meant, and the draft's routers are not bound."""
    case, expect = running.case, running.expect
    runner = "vllm.v1.worker.gpu.model_runner" if case.env else "vllm.v1.worker.gpu_model_runner"
    expect(f"runner {runner}, got {found['runner']}", found["runner"] == runner)
    scheduling = case.args.get("async_scheduling", True)
    expect(f"async_scheduling {scheduling}", found["async_scheduling"] == scheduling)
    is_eager = "enforce_eager" in case.args
    expect(
        "CUDA graphs" if not is_eager else "no CUDA graphs",
        is_eager == ("NONE" in found["cudagraph_mode"]),
    )
    expect(
        "all target routers captured", 0 < found["target_captures"] == found["target_moe_layers"]
    )
    expect("no draft router captured", found["draft_captures"] == 0)
    if case.draft:
        routers = 1 if case.draft in (MTP, DRAFT) else 0
        expect(f"{routers} MoE layers in the draft", found["draft_moe_layers"] == routers)


def engine_args(case: Case, models: Path, dtype: str, on_gpu: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    args = COMMON | case.args | dict(model=str(models / case.target), dtype=dtype)
    if case.draft:
        method, draft = case.draft
        args["speculative_config"] = dict(method=method, num_speculative_tokens=DRAFT_TOKENS)
        if method != "mtp":
            args["speculative_config"]["model"] = str(models / draft)
    if on_gpu:
        return args | dict(worker_cls="tests.gpu.lifecycle_worker.LivesWorker")
    for name in ("kv_cache_memory_bytes", "compilation_config"):
        args.pop(name, None)
    return args | EAGER | dict(gpu_memory_utilization=0.1)


def _model_to_replace(case: Case, models: Path, directory: Path) -> Path:
    """A copy of the target, and beside it the weights that are to take the place of its own."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(models / case.target, directory / "model")
    other = models / "other" / "model.safetensors"
    shutil.copyfile(other, directory / "other-weights.safetensors")
    return directory / "model"


def note(report: dict[str, Any], error: Exception) -> None:
    """Keep an unexpected error as a problem of the case, and its traceback in the log."""
    traceback.print_exception(error)
    report["problems"].append(f"{type(error).__name__}: {str(error)[:500]}")


def live(report: dict[str, Any], running: Running, on_gpu: bool) -> None:
    """Lead the case's life and say what it was made of."""
    if on_gpu:
        report["engine"] = running.rpc("describe")
        check_description(running, report["engine"])
    LIVES[running.case.life](running)
    report["drafts"] = running.metrics()
    report["cached_tokens"] = running.cached
    if on_gpu and running.case.life != "serve":
        # weights that were loaded again must not have lost their captures
        report["engine"] = running.rpc("describe")
        check_description(running, report["engine"])


def run_case(name: str, models: Path, work: Path, out: Path, dtype: str, on_gpu: bool) -> int:
    """Start the engine, lead its life, then judge what it answered."""
    case, begin = CASES[name], time.time()
    report: dict[str, Any] = dict(case=name, dtype=dtype, problems=[])
    try:
        args = engine_args(case, models, dtype, on_gpu)
        if case.life == "reload":
            args["model"] = str(_model_to_replace(case, models, work / name))
        from vllm import LLM

        llm = LLM(**args)
        report["start_s"] = round(time.time() - begin)
        running = Running(case, llm, work / name if case.life == "reload" else models)
        report["problems"] = running.problems
        try:
            live(report, running, on_gpu)
        except Exception as error:
            note(report, error)
        arrays = {k: v for p, a in running.phases.items() for k, v in pack(p, a).items()}
        np.savez(work / f"{name}.npz", **arrays)
        llm.llm_engine.engine_core.shutdown()
        report["lived_s"] = round(time.time() - begin)
        judge_phases(report, running, models, dtype)
    except Exception as error:
        note(report, error)
    report["seconds"] = round(time.time() - begin)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(report["problems"]))


def judge_phases(report: dict[str, Any], running: Running, models: Path, dtype: str) -> None:
    """Every phase against the truth about its model, and against the phase before the change."""
    import torch

    from tests.gpu.lifecycle_truth import share_differing

    torch.set_num_threads(4)
    limits, case = LIMITS[dtype], running.case
    truths = {target: Truth(models / target) for target in set(running.truths.values())}
    report["phases"] = {}
    for phase, answers in running.phases.items():
        truth = truths[running.truths[phase]]
        found = report["phases"][phase] = judge(truth, answers, limits)
        report["problems"] += [f"{phase}: {problem}" for problem in found["problems"]]
        if case.life == "sleep" and "-level-" in phase:
            before = running.phases["warm" if phase.startswith("warm") else "cold"]
            found["as_before"] = compare_runs(answers, before, limits)
            for problem in found["as_before"]["problems"]:
                report["problems"].append(f"{phase}, as before: {problem}")
        if case.life == "reload" and phase.startswith("new"):
            share = share_differing(truths[case.target], answers)
            found["share_differing_from_the_old_weights"] = round(share, 3)
            running.expect("rows unlike those of the old weights", share > 0.5)


class Report:
    """What was found so far, written again whenever a case has ended."""

    def __init__(self, out: Path, work: Path, dtype: str) -> None:
        self.out, self.work, self.dtype = out, work, dtype
        self.found: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()

    def add(self, name: str, code: int, seconds: float) -> None:
        """Take in a case's own report, or what is known without one."""
        path = self.out / f"{name}.json"
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = dict(case=name, problems=[f"no report, exit {code}"])
        found["exit"], found["wall_s"] = code, round(seconds)
        if code and not found["problems"]:
            found["problems"].append(f"exit {code}")
        if found["problems"]:
            found["log"] = self._errors(name)
        with self.lock:
            self.found[name] = found
            self._compare_with_references()
            print(self.line(name), flush=True)
            self.write()

    def _errors(self, name: str) -> list[str]:
        """The log's lines that may name a cause, and its last ones."""
        path = self.out / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        named = [line[-300:] for line in lines if "Error: " in line or "assert " in line]
        return [*named[:6], *(line[-300:] for line in lines[-4:])]

    def _compare_with_references(self) -> None:
        for name, found in self.found.items():
            reference = REFERENCE[CASES[name].target]
            if name == reference or "as_reference" in found or reference not in self.found:
                continue
            paths = self.work / f"{name}.npz", self.work / f"{reference}.npz"
            if not all(path.exists() for path in paths):
                found["as_reference"] = "not compared: no rows"
                continue
            try:
                mine, other = (unpack(path) for path in paths)
                result = compare_runs(mine["cold"], other["cold"], LIMITS[self.dtype])
            except Exception as error:
                result = dict(problems=[f"{type(error).__name__}: {error}"])
            found["as_reference"] = result
            found["problems"] += [f"as {reference}: {p}" for p in result["problems"]]

    def line(self, name: str) -> str:
        found = self.found[name]
        phases = found.get("phases", {}).values()
        total = {
            key: sum(phase[key] for phase in phases)
            for key in ("rows", "equal_rows", "cells", "differing_cells")
        }
        drafts = found.get("drafts", {})
        verdict = "FAILED" if found["problems"] else "ok"
        speculation = f"{drafts.get('accepted', 0):.0f}/{drafts.get('drafted', 0):.0f} drafts, "
        return (
            f"{name}: {verdict}, {total['equal_rows']} of {total['rows']} rows equal, "
            f"{total['differing_cells']} of {total['cells']} cells differ, "
            f"{speculation if CASES[name].draft else ''}{found['wall_s']} s "
            f"{'; '.join(found['problems'])[:400]}"
        )

    def write(self) -> None:
        (self.out / "lives.json").write_text(json.dumps(self.found, indent=1) + "\n")


def start_case(name: str, given: argparse.Namespace, models: Path, work: Path) -> int:
    """Run one case in a process of its own, never longer than its limit."""
    case, env = CASES[name], dict(os.environ)
    env |= case.env | {"R3_LIVES_LOCK": str(work / "lock"), "OMP_NUM_THREADS": "4"}
    # engines that compile the same graph at a time would write the same files
    env["VLLM_CACHE_ROOT"] = str(work / "cache" / name)
    if given.dtype == "float32":
        env["TRITON_F32_DEFAULT"] = "ieee"
    command = ["timeout", "-k", "5", str(given.limit), sys.executable, "-m", "tests.gpu.lifecycle"]
    command += [str(given.out), name, "--run", "--work", str(work), "--models", str(models)]
    command += ["--dtype", given.dtype]
    with open(given.out / f"{name}.log", "w") as log:
        return subprocess.run(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        ).returncode


def main(given: argparse.Namespace) -> int:
    """Make the models, run the cases, report."""
    given.out.mkdir(parents=True, exist_ok=True)
    work = given.work or Path(tempfile.mkdtemp(prefix="lives-"))
    work.mkdir(parents=True, exist_ok=True)
    models = given.models or work / "models"
    if not (models / "eagle3" / "model.safetensors").exists():
        # In a process of its own: torch threads must not be there when engines fork.
        command = [sys.executable, "-m", "tests.gpu.lifecycle_models", str(models)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            print(made.stdout, made.stderr, file=sys.stderr)
            return 1
    report = Report(given.out, work, given.dtype)

    def run(name: str) -> None:
        begin, code = time.time(), -1
        try:
            code = start_case(name, given, models, work)
        finally:
            report.add(name, code, time.time() - begin)

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(run, given.cases or CASES))
    print("all cases")
    for name in report.found:
        print(report.line(name))
    return int(any(found["problems"] for found in report.found.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--at-once", type=int, default=4, help="engines that run at the same time")
    parser.add_argument("--limit", type=int, default=150, help="seconds for one case")
    parser.add_argument("--dtype", default="float32", choices=LIMITS)
    parser.add_argument("--models", type=Path, help="where the models are, or will be, written")
    for hidden in ("--run", "--work"):
        kind: dict[str, Any] = dict(action="store_true") if hidden == "--run" else dict(type=Path)
        parser.add_argument(hidden, help=argparse.SUPPRESS, **kind)
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}, known are {', '.join(CASES)}")
    if arguments.run:
        has_gpu = "cpu" not in importlib.metadata.version("vllm")
        sys.exit(
            run_case(
                arguments.cases[0],
                arguments.models,
                arguments.work,
                arguments.out,
                arguments.dtype,
                has_gpu,
            )
        )
    sys.exit(main(arguments))
