"""build.sh refuses what it cannot do, before it builds anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "build.sh"
HAS_DRIVER = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
TOOLS = ("bash", "dirname", "uname", "cat", "mkdir", "env")


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


def bare_path(tmp_path: Path, *more: str) -> str:
    """A PATH with a few tools and nothing else."""
    for name in (*TOOLS, *more):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "expected a command, got ''"),
        (["serve"], "expected a command, got 'serve'"),
        (["wheel", "--target", "tpu"], "--target takes cpu or cuda, got 'tpu'"),
        (["wheel", "--target"], "--target needs a value"),
        (["wheel", "more"], "wheel does not take more"),
        (["venv", "--fast"], "venv does not take --fast"),
        (["clean", "all"], "clean takes no argument, got all"),
    ],
)
def test_wrong_usage_exits_2_and_shows_the_usage(args: list[str], message: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"build.sh: {message}"
    assert "usage: ./build.sh COMMAND" in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has an NVIDIA driver")
def test_cuda_environment_without_a_driver_is_refused(tmp_path: Path) -> None:
    done = run("venv", str(tmp_path / "env"), "--target", "cuda")
    assert done.returncode == 2
    assert done.stderr.startswith("build.sh: --target cuda needs an NVIDIA driver, found none")
    assert not (tmp_path / "env").exists()


def test_missing_git_is_named(tmp_path: Path) -> None:
    done = run("wheel", "--target", "cpu", PATH=bare_path(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        "build.sh: git was not found; install it (Debian: apt-get install git)\n"
    )


def test_python_out_of_range_is_named_with_its_version(tmp_path: Path) -> None:
    python = tmp_path / "python3.99"
    python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.99.0\nexit $#\n')
    python.chmod(0o755)
    done = run("wheel", "--target", "cpu", PYTHON=str(python))
    assert done.returncode == 1
    assert done.stderr.startswith(f"build.sh: expected Python 3.10 to 3.13, found {python}: Python")


def test_python_without_venv_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    wrapper = tmp_path / "wrapped"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$2" in *executable*) echo {python};; *) exec {python} "$@";; esac\n'
    )
    wrapper.chmod(0o755)
    done = run("wheel", "--target", "cpu", PYTHON=str(wrapper))
    assert done.returncode == 1
    assert "(Debian: apt-get install python3-venv)" in done.stderr


def sourced(body: str) -> subprocess.CompletedProcess[str]:
    """Run lines in the script's own functions, its main left out."""
    text = SCRIPT.read_text().replace('\nmain "$@"\n', "\n")
    return subprocess.run(
        ["bash", "-c", text.replace("${BASH_SOURCE[0]}", str(SCRIPT)) + body],
        capture_output=True,
        text=True,
        check=False,
    )


def test_step_stops_at_its_first_failing_command(tmp_path: Path) -> None:
    mark = tmp_path / "reached"
    body = f'BUILD={tmp_path}\nSTEPS=1\nbad() {{ false; touch {mark}; }}\nstep x "the step" bad\n'
    done = sourced(body + "echo went on\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "[1/1] the step … failed after 0 s; the end of" in done.stderr
    assert "run the same command again" in done.stderr
    assert not mark.exists()


def test_failed_check_is_kept_and_the_next_one_runs(tmp_path: Path) -> None:
    body = f"BUILD={tmp_path}\nSTEPS=2\nCHECKING=1\nstep x one false\nstep y two true\n"
    done = sourced(body + 'echo "${FAILED[*]}"\n')
    assert (done.returncode, done.stdout) == (0, "one\n")
    assert "[2/2] two … (" in done.stderr


def test_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    body = f'BUILD={tmp_path}\nbad() {{ seq 1000 1040; return 3; }}\nstep x "the step" bad\n'
    lines = sourced(body).stderr.splitlines()
    assert lines[1:26] == [str(n) for n in range(1016, 1041)]


def test_full_disk_is_refused_before_the_build(tmp_path: Path) -> None:
    done = sourced(f"need_space {tmp_path} 1000000 'the environment'\n")
    assert done.returncode == 1
    assert "the environment needs 1000000 GiB, " in done.stderr


def test_folder_with_other_files_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    done = sourced(f"PY={sys.executable}\ndeps_step {tmp_path} cpu\n")
    assert done.returncode == 1
    assert "expected a new folder or an environment of this command, found other" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_stamp_of_other_inputs_is_no_stamp(tmp_path: Path) -> None:
    body = f"stamp {tmp_path}/s one\nstamped {tmp_path}/s one && echo same\n"
    assert sourced(body).stdout == "same\n"
    assert sourced(f"stamped {tmp_path}/s two || echo other\n").stdout == "other\n"
