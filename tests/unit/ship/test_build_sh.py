"""build.sh refuses what it cannot do, before it builds anything."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from build_script import SCRIPT, build_sh, sourced

from vllm_r3.series.folder import read_series, series_folder

ROOT = SCRIPT.parent
HAS_DRIVER = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
TOOLS = ("bash", "dirname", "uname", "cat", "mkdir", "env")


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
        (["venv", "a", "b"], "venv does not take b"),
        (["wheel", "--part-size", "1"], "wheel does not take --part-size"),
        (["bundle", "--part-size", "2G"], "--part-size takes a number of bytes, got '2G'"),
        (["bundle", "here"], "bundle does not take here"),
        (["test", "--vllm"], "--vllm needs a value"),
        (["demo", "--vllm", "1"], "--vllm takes a version with a folder in patches, got '1'"),
        (["clean", "all"], "clean takes no argument, got all"),
    ],
)
def test_wrong_usage_exits_2_and_shows_the_usage(args: list[str], message: str) -> None:
    done = build_sh(*args)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"build.sh: {message}"
    assert "usage: ./build.sh COMMAND" in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has an NVIDIA driver")
def test_cuda_environment_without_a_driver_is_refused(tmp_path: Path) -> None:
    done = build_sh("venv", str(tmp_path / "env"), "--target", "cuda")
    assert done.returncode == 2
    assert done.stderr.startswith("build.sh: --target cuda needs an NVIDIA driver, found none")
    assert not (tmp_path / "env").exists()


def test_missing_git_is_named(tmp_path: Path) -> None:
    done = build_sh("wheel", "--target", "cpu", PATH=bare_path(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        "build.sh: git was not found; install it (Debian: apt-get install git)\n"
    )


def test_python_out_of_range_is_named_with_its_version(tmp_path: Path) -> None:
    python = tmp_path / "python3.99"
    python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.99.0\nexit $#\n')
    python.chmod(0o755)
    done = build_sh("wheel", "--target", "cpu", PYTHON=str(python))
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
    done = build_sh("wheel", "--target", "cpu", PYTHON=str(wrapper))
    assert done.returncode == 1
    assert "(Debian: apt-get install python3-venv)" in done.stderr


def test_step_stops_at_its_first_failing_command(tmp_path: Path) -> None:
    mark = tmp_path / "reached"
    body = f'BUILD={tmp_path}\nSTEPS=1\nbad() {{ false; touch {mark}; }}\nstep x "the step" bad\n'
    done = sourced(body + "echo went on\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "[1/1] the step … failed after 0 s; the end of" in done.stderr
    assert "step 'the step' failed; fix the error above and run the same command" in done.stderr
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


def test_step_runs_again_if_its_inputs_changed_or_it_failed(tmp_path: Path) -> None:
    body = f"BUILD={tmp_path}\nwork() {{ echo ran >>{tmp_path}/ran; [[ $1 != bad ]]; }}\n"
    for key, runs in (("one", 1), ("one", 1), ("two", 2), ("bad", 3), ("bad", 4), ("two", 5)):
        done = sourced(body + f"cached {tmp_path}/s {key} x 'the step' work {key}\n")
        assert done.returncode == (key == "bad")
        assert (tmp_path / "ran").read_text() == "ran\n" * runs, key


@pytest.mark.parametrize(
    ("args", "paths"),
    [
        ("", "tests/unit tests/upstream tests/engine tests/serving"),
        ("unit upstream", "tests/unit tests/upstream"),
        ("unit -k name", "tests/unit -k name"),
        ("tests/unit/client -x", "tests/unit/client -x"),
    ],
)
def test_parts_of_the_tests_are_their_folders(tmp_path: Path, args: str, paths: str) -> None:
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("ruff", "vllm-r3", "python"):
        (bin_folder / name).write_text('#!/bin/sh\necho "$@"\n')
        (bin_folder / name).chmod(0o755)
    body = "build_venv() { :; }\ninstall_locked() { :; }\nfetch_wheel() { echo fetched $1; }\n"
    body += f"unlock_build() {{ :; }}\nBUILD={tmp_path}\nmkdir -p $BUILD/venv/.vllm-r3\n"
    done = sourced(body + f"touch $BUILD/venv/.vllm-r3/deps\ncmd_test {args}\n")
    assert done.stdout == f"-m pytest {paths}\n"
    assert (tmp_path / "logs" / "fetch-cuda.log").exists() == (args == "")


def test_bundle_into_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    done = build_sh("bundle", "--target", "cpu", "--dest", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        f"build.sh: {tmp_path}: expected a new or empty folder, found files; choose another one\n"
    )


@pytest.mark.skipif(
    not (ROOT / ".build" / "tool" / ".key").exists(), reason="build.sh has not made its tools here"
)
@pytest.mark.parametrize("vllm", ["0.21.0", "0.30.0"])
def test_image_passes_the_labels_and_its_arguments_to_the_builder(vllm: str) -> None:
    args = ["--target", "rl-ci", "--tag", "a b"]
    done = build_sh("image", *args, "--vllm", vllm, IMAGE_BUILDER="printf %s\\n build")
    series = read_series(series_folder(vllm))
    labels = {
        "VLLM": vllm,
        "R3_PIN": f"v{vllm}@{series.pin.commit}",
        "R3_SERIES": series.hash,
        "R3_VERSION": f"{vllm}+r3.{series.pin.revision}",
    }
    assert done.stdout.splitlines() == [
        *("build", *(f"--build-arg={k}={v}" for k, v in labels.items())),
        *("--file", f"{ROOT}/docker/Dockerfile", *args, str(ROOT)),
    ]
    assert done.returncode == 0
