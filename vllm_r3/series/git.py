"""Run git so that nobody's configuration or language changes what it writes.

Knows nothing of vLLM or of the series. `Git` is bound to one working tree.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_r3.errors import R3Error

CLEAN_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
    **{f"GIT_{who}_NAME": "vllm-r3" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "vllm-r3@localhost" for who in ("AUTHOR", "COMMITTER")},
}
# What git reads from the user's home all the same, and what a tree's own settings could change.
SETTINGS = {
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.hooksPath": os.devnull,
    "core.autocrlf": "false",
    "core.quotePath": "false",
    "commit.gpgSign": "false",
    "gc.auto": "0",
}


class Git:
    """git in one working tree."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(
        self, *args: str | Path, data: bytes = b"", env: Mapping[str, str] | None = None
    ) -> bytes:
        """Run one git command and return its stdout; a failure is an R3Error with git's words."""
        done = self._call(args, data, env or {})
        if done.returncode:
            words = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
            raise R3Error(f"git {args[0]} failed in {self.root}: {words}")
        return done.stdout

    def text(self, *args: str | Path) -> str:
        """Return the stripped stdout of one command."""
        return self.run(*args).decode("utf-8", "replace").strip()

    def succeeds(self, *args: str | Path, data: bytes = b"") -> bool:
        """Return whether a command exits 0."""
        return self._call(args, data, {}).returncode == 0

    def _call(
        self, args: Sequence[str | Path], data: bytes, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        if not self.root.is_dir():
            raise R3Error(f"{self.root}: expected a folder, found none")
        settings = [part for k, v in SETTINGS.items() for part in ("-c", f"{k}={v}")]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | CLEAN_ENV
        try:
            return subprocess.run(
                ["git", *settings, *args],
                cwd=self.root,
                input=data,
                env={**clean, **env},
                capture_output=True,
            )
        except FileNotFoundError as error:
            message = "git was not found on PATH; install it (Debian: apt-get install git)"
            raise R3Error(message) from error
