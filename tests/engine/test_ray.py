"""Both Ray executors, on a real Ray of two nodes: rows by value, and what is kept of them.

One process runs all engines (ray_engines.py); its Ray is told of one GPU on each of two nodes, and
vLLM's CPU build takes them (ray_platform.py). A rank on the other node is reached as on another
host: over TCP.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from engines import CPU_ENV
from oracle_checks import check_greedy, check_rows
from platform_plugin import write_plugin
from pool import STARTS
from ray_engines import CASES, MAX_TOKENS, PROMPTS

from tests.gpu.ray_head import ray_head

HERE = Path(__file__).resolve().parent
LIMIT = 300  # seconds for all engines
# A step array that is kept stops the compiled graph; by default that is noticed after 300 s.
STALL = "60"
KEYS = [f"{turn}_{i}" for turn in range(2) for i in range(len(PROMPTS))]


class Run(NamedTuple):
    """What one case returned, and what was seen of its engine."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


def run_engines(model: Path, out: Path, environment: dict[str, str]) -> None:
    """Run ray_engines.py; how it ended, and its last output, if it failed."""
    command = [sys.executable, str(HERE / "ray_engines.py"), str(model), str(out)]
    with open(out / "log", "w") as log:
        try:
            ended = subprocess.run(
                command, env=os.environ | environment, stdout=log, stderr=log, timeout=LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            ended = f"none after {LIMIT} s"
    assert ended == 0, f"exit {ended}:\n{(out / 'log').read_text(errors='replace')[-6000:]}"


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> dict[str, Run]:
    """All cases, run by a process of their own on a Ray of their own."""
    out = tmp_path_factory.mktemp("ray")
    # not only for the driver: the compiled-graph executor hands few variables on to its workers
    given = CPU_ENV | {"RAY_CGRAPH_get_timeout": STALL}
    given["PYTHONPATH"] = write_plugin(out, "ray_platform")
    with ray_head(1, 1, given, object_store_bytes=80_000_000, gpus_of_others=[1]) as environment:
        run_engines(models("moe"), out, environment)
    found = {}
    for name in CASES:
        facts = json.loads((out / f"{name}.json").read_text())
        found[name] = Run(dict(np.load(out / f"{name}.npz")), facts)
        STARTS.append((f"ray {name}", facts["start_s"]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_rows_over_ray_equal_the_oracle(name, runs, oracles):
    oracle, found = oracles("moe"), runs[name].arrays
    for key in KEYS:
        tokens = found["tokens" + key].tolist()
        truth = oracle.truth(tokens)
        num_prompt_tokens = len(tokens) - MAX_TOKENS
        check_greedy(truth, tokens, num_prompt_tokens, key)
        rows = found["prompt" + key], found["rows" + key]
        check_rows(oracle, truth, num_prompt_tokens, *rows, where=f"{name} {key}")


def test_the_cases_ran_as_they_are_named(runs):
    """Scheduling as vLLM chose it, with preemptions and cached prompts; ranks apart."""
    facts = {name: run.facts for name, run in runs.items()}
    assert {name: f["async_scheduling"] for name, f in facts.items()} == {
        "v2": True,
        "v2-away": True,
        "v1": False,
    }
    assert all(f["preemptions"] > 0 for f in facts.values()), facts
    for run in runs.values():
        assert sum(int(run.arrays["cached" + key]) for key in KEYS) > 0
    assert facts["v2-away"]["executor"] == "RayExecutorV2"
    assert facts["v2-away"]["away"] == [True]
    assert facts["v1"]["executor"] == "RayDistributedExecutor"
    assert facts["v1"]["away"] == [False, True]


def test_no_array_of_a_step_is_held_when_the_requests_have_ended(runs):
    """The compiled graph's are views of its channel: a held one would stop it ten steps later."""
    assert runs["v1"].facts["step_writeable"] == [False]
    for name in ("v1", "v2-away"):
        facts = runs[name].facts
        assert facts["step_arrays"] > 100
        assert facts["alive"] == 0
