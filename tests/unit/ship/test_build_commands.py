"""`build.sh bundle` and `build.sh image` refuse what they cannot do, and pass the labels on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from vllm_r3.series.folder import read_series
from vllm_r3.ship.labels import build_arguments

ROOT = Path(__file__).resolve().parents[3]


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "build.sh"), *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bundle", "--target", "tpu"], "--target takes cpu or cuda, got 'tpu'"),
        (["bundle", "--part-size", "2G"], "--part-size takes a number of bytes, got '2G'"),
        (["bundle", "--part-size"], "--part-size needs a value"),
        (["bundle", "here"], "bundle does not take here"),
    ],
)
def test_wrong_usage_of_bundle_exits_2(args: list[str], message: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"build.sh: {message}"


def test_bundle_into_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    done = run("bundle", "--target", "cpu", "--dest", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        f"build.sh: {tmp_path}: expected a new or empty folder, found files; choose another one\n"
    )


@pytest.mark.skipif(
    not (ROOT / ".build" / "tool" / ".key").exists(), reason="build.sh has not made its tools here"
)
def test_image_passes_the_labels_and_its_arguments_to_the_builder() -> None:
    done = run("image", "--target", "rl-ci", "--tag", "a b", IMAGE_BUILDER="printf %s\\n build")
    labels = [f"--build-arg={k}={v}" for k, v in build_arguments(read_series()).items()]
    file = f"{ROOT}/docker/Dockerfile"
    assert done.stdout.splitlines() == [
        *("build", *labels, "--file", file, "--target", "rl-ci", "--tag", "a b", str(ROOT))
    ]
    assert done.returncode == 0
