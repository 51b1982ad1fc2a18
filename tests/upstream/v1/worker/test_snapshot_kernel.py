# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From the staging buffer to memory of the host, on the GPU path of the recorder."""

import json
import os
import subprocess
import sys

import interpreted_snapshots
import pytest
from interpreted_snapshots import CASES, ENVIRONMENT


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What failed in each case, in a process where Triton's interpreter is on."""
    run = subprocess.run(
        [sys.executable, interpreted_snapshots.__file__],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_interpreted(outcomes, case: str):
    assert outcomes[case] == ""
