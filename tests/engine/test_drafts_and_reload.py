"""EAGLE, MTP and MoE drafts, and weights loaded again: rows by value, on the CPU build.

The cases are those of tests/gpu/lives.py, which says what each of them compares and runs all of
them on a GPU; here are the ones that the CPU build has, with the V1 runner, eager and sync.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# the phases that each case must have judged
PHASES = {
    "plain-moe": ["cold", "warm"],
    "plain-glm": ["cold", "warm"],
    "eagle-v1": ["cold", "warm"],
    "mtp-v1-preempting": ["cold", "warm"],
    "reload-v1": ["cold", "new-cold", "new-warm"],
}
LIMIT = 600  # seconds for one case


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What every case found, by its name."""
    out = tmp_path_factory.mktemp("lives")
    environment = os.environ | {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.gpu.lifecycle", str(out), *PHASES]
    command += ["--at-once", "2", "--limit", str(LIMIT)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    report = out / "lives.json"
    assert report.exists(), run.stdout + run.stderr
    return json.loads(report.read_text())


@pytest.mark.parametrize("case", PHASES)
def test_rows_are_those_of_a_float32_forward_pass(found, case):
    result = found[case]
    assert result["problems"] == []
    assert list(result["phases"]) == PHASES[case]
    for phase in result["phases"].values():
        assert phase["rows"] == phase["expected_rows"] > 1000
        assert phase["differing_cells"] < phase["cells"] / 1000
        assert all(share > 0.9 for share in phase["share_wrong_if_spoiled"].values())


@pytest.mark.parametrize("case", ["eagle-v1", "mtp-v1-preempting"])
def test_drafts_were_accepted_and_rejected(found, case):
    drafts = found[case]["drafts"]
    assert 0 < drafts["accepted"] < drafts["drafted"]
    assert (drafts["preemptions"] > 0) is (case == "mtp-v1-preempting")
