"""Run build.sh, or lines in its own functions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "build.sh"


def build_sh(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    command = ["bash", str(SCRIPT), *args]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def sourced(body: str) -> subprocess.CompletedProcess[str]:
    """Run lines in the script's own functions, its main left out."""
    text = SCRIPT.read_text().replace('\nmain "$@"\n', "\n")
    text = text.replace("${BASH_SOURCE[0]}", str(SCRIPT))
    return subprocess.run(["bash", "-c", text + body], capture_output=True, text=True, check=False)
