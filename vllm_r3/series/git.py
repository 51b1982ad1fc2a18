"""Run git so that nobody's configuration or language changes what it writes.

Knows nothing of vLLM or of the series. `Git` is bound to one working tree and asserts that this
tree is a repository's own root: below another repository `git apply` would exit 0 and do nothing.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from vllm_r3.errors import R3Error

NOBODY = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
    "GIT_COMMITTER_NAME": "vllm-r3",
    "GIT_COMMITTER_EMAIL": "vllm-r3@localhost",
}
SETTINGS = {
    "core.autocrlf": "false",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.hooksPath": os.devnull,
    "core.quotePath": "false",
    "core.safecrlf": "false",
    "commit.gpgSign": "false",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
    "diff.orderFile": os.devnull,
    "diff.context": "3",
    "diff.interHunkContext": "0",
    "diff.suppressBlankEmpty": "false",
    "format.encodeEmailHeaders": "true",
    "format.headers": "",
    "format.notes": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "user.name": "vllm-r3",
    "user.email": "vllm-r3@localhost",
}


class Git:
    """git in one working tree."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(
        self, *args: str, data: bytes | None = None, env: dict[str, str] | None = None
    ) -> bytes:
        """Run one git command and return its stdout.

        Raises:
            R3Error: git is missing or the command failed; the message has git's own words.
        """
        done = self._call(args, data, env)
        if done.returncode:
            words = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
            raise R3Error(f"git {args[0]} failed in {self.root}: {words}")
        return done.stdout

    def text(self, *args: str) -> str:
        """Return the stripped stdout of one command."""
        return self.run(*args).decode("utf-8", "replace").strip()

    def succeeds(self, *args: str) -> bool:
        """Tell whether a command exits 0."""
        return self._call(args, None, None).returncode == 0

    def init(self) -> None:
        """Make the working tree a repository whose own settings keep every byte as it is."""
        self.run("init", "-q", "--initial-branch=main", ".")
        for key in ("core.autocrlf", "core.safecrlf"):
            self.run("config", key, "false")

    def assert_root(self) -> None:
        """Refuse a folder that is not the root of its own repository."""
        if not (self.root / ".git").exists():
            raise R3Error(
                f"{self.root}: expected the root of a git tree made by 'vllm-r3 series import', "
                "found no .git there"
            )

    def _call(
        self, args: tuple[str, ...], data: bytes | None, env: dict[str, str] | None
    ) -> subprocess.CompletedProcess[bytes]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        settings = [part for k, v in SETTINGS.items() for part in ("-c", f"{k}={v}")]
        command = ["git", *settings, *args]
        try:
            return subprocess.run(
                command,
                cwd=self.root,
                input=data if data is not None else b"",
                capture_output=True,
                env={**clean, **NOBODY, **(env or {})},
                check=False,
            )
        except FileNotFoundError as error:
            if not self.root.is_dir():
                raise R3Error(f"{self.root}: expected a folder, found none") from error
            raise R3Error(
                "git was not found on PATH; install it (Debian: apt-get install git)"
            ) from error
