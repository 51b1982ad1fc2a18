"""The Dockerfile and the shell scripts pass their linters, which come with the `test` extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = [
    ".ci/run",
    "build.sh",
    "docker/install.sh",
    "tests/docker/base.sh",
    "tests/docker/bundle.sh",
    "tests/docker/image.sh",
]


def lint(tool: str, *args: str) -> str:
    program = Path(sys.executable).with_name(tool)
    assert program.exists(), f"expected {program}, found none; run ./build.sh test"
    done = subprocess.run(
        [str(program), *args], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert lint("hadolint", "docker/Dockerfile") == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script: str) -> None:
    assert lint("shellcheck", "--severity=warning", script) == ""


def test_every_shell_script_is_checked() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in (".ci", "docker", "tests", "vllm_r3")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.read_bytes()[:30].startswith((b"#!/usr/bin/env bash", b"#!/bin"))
    }
    assert found | {"build.sh"} == set(SCRIPTS)


@pytest.mark.parametrize(
    ("tool", "text", "rule"),
    [
        ("hadolint", "FROM debian\n", "DL3006"),
        ("shellcheck", "#!/bin/sh\nrm $1\n", "SC2086"),
    ],
)
def test_linter_finds_what_is_wrong(tool: str, text: str, rule: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    assert rule in lint(tool, str(file))
