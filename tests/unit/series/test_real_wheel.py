"""Each series of this checkout on its pinned wheels themselves."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sample_series import SPDX, am, snapshot

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import Series, read_series, series_folder
from vllm_r3.series.installed import apply_series, read_status, revert_series
from vllm_r3.series.patch import apply_patch, blobs
from vllm_r3.series.pinned_wheel import pinned_wheel, python_files
from vllm_r3.series.tree import export_series, import_series
from vllm_r3.series.upstream import SENDER, export_upstream, read_tests
from vllm_r3.series.verify import verify_folder, verify_sources

BOTH = pytest.mark.parametrize("target", ["cpu", "cuda"])


@pytest.fixture(scope="module", params=["0.21.0", "0.30.0"])
def series(request: pytest.FixtureRequest) -> Series:
    return read_series(series_folder(request.param))


def wheel_of(series: Series, target: str) -> Path:
    """The wheel from the cache; `build.sh test` fetches both of its version."""
    try:
        return pinned_wheel(series.pin, target, fetch=False)
    except R3Error as error:
        pytest.skip(f"the {target} wheel is not in the cache: {error}")


@BOTH
def test_series_has_no_finding(series: Series, target: str) -> None:
    findings, patches = verify_folder(series.folder, series.pin)
    findings += verify_sources(patches, python_files(wheel_of(series, target)))
    assert [str(finding) for finding in findings] == []


def test_import_then_export_changes_no_byte(series: Series, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    import_series(series, python_files(wheel_of(series, "cpu")), tree)
    assert export_series(tree, series.folder, write=False) == ([], [])


@BOTH
def test_apply_then_revert_gives_the_wheels_bytes(
    series: Series, target: str, tmp_path: Path
) -> None:
    """On the Python files and the metadata; the compiled libraries stay in the wheel."""
    with zipfile.ZipFile(wheel_of(series, target)) as archive:
        names = [n for n in archive.namelist() if n.endswith(".py") or ".dist-info/" in n]
        archive.extractall(tmp_path, names)
    before = snapshot(tmp_path)
    assert read_status(series, tmp_path)[0] == "stock"
    version, num_files = series.pin.patched_version(target), len(blobs(series.patches())) + 1
    assert apply_series(series, tmp_path) == (version, num_files)
    assert apply_series(series, tmp_path) == (version, 0)
    assert read_status(series, tmp_path)[0] == "patched"
    revert_series(tmp_path)
    assert snapshot(tmp_path) == before


def test_wheels_differ_in_the_pinned_files_alone(series: Series) -> None:
    cpu = python_files(wheel_of(series, "cpu"))
    cuda = python_files(wheel_of(series, "cuda"))
    assert sorted(set(cpu) - set(cuda)) == []
    folders = {"/".join(path.split("/")[:2]) + "/" for path in set(cuda) - set(cpu)}
    differ = {path for path in cpu if cpu[path] != cuda[path]}
    assert folders | differ == set(series.pin.target_specific)


def test_upstream_export_by_git_am_makes_the_files_of_the_strict_reader(
    series: Series, tmp_path: Path
) -> None:
    sources = python_files(wheel_of(series, "cpu"))
    export_upstream(series, sources, tmp_path / "out")
    git = am(sources, tmp_path / "out", tmp_path / "vllm")
    patches = series.patches()
    files: dict[str, bytes | None] = dict(sources)
    for patch in patches:
        apply_patch(patch, files)
    tests = {path: data for files in read_tests(series).values() for path, data in files.items()}
    want = {path: data for path, data in {**files, **tests}.items() if data is not None}
    found = git.text("ls-tree", "-r", "--name-only", "HEAD").splitlines()
    assert {path: (git.root / path).read_bytes() for path in found} == want
    log = git.text("log", "--reverse", "--format=%s%n%(trailers:key=Signed-off-by)").splitlines()
    signed = [[patch.subject, f"Signed-off-by: {SENDER}"] for patch in patches]
    assert [line for line in log if line][1:] == sum(signed, [])


def ruff(*args: str | Path) -> str:
    command = [sys.executable, "-m", "ruff", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_patches_pass_vllms_lint(series: Series, tmp_path: Path) -> None:
    """Each prefix defines the names that it uses; new files and tests are as vLLM wants them.

    Those are the rules of vLLM's own pre-commit that ruff has.
    """
    files: dict[str, bytes | None] = dict(python_files(wheel_of(series, "cpu")))
    new = {path: data for tests in read_tests(series).values() for path, data in tests.items()}
    for folder in ("prefixes", "new"):
        (tmp_path / folder).mkdir()
    for number, patch in enumerate(series.patches(), 1):
        apply_patch(patch, files)
        for change in patch.changes:
            data = files[change.path]
            if data is not None and change.path.endswith(".py"):
                write(tmp_path / "prefixes" / f"{number:02d}" / change.path, data)
            if data is not None and (change.old_blob is None or change.path in new):
                new[change.path] = data
    for path, data in new.items():
        assert data.startswith(SPDX.encode()) or not data, path
        write(tmp_path / "new" / path, data)
    rules = ["--isolated", "--select", "F821,F811,F401", tmp_path / "prefixes"]
    assert ruff("check", *rules) == ""
    rules = ["--isolated", "--line-length", "88", "--target-version", "py310"]
    rules += ["--config", "lint.isort.known-first-party=['vllm']", tmp_path / "new"]
    select = ["--select", "E,F,UP,B,ISC,SIM,I,G", "--ignore", "F403,F405,E731,B905,B007,UP007"]
    assert ruff("check", *select, *rules) == ""
    assert ruff("format", "--check", *rules) == ""


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_every_patch_stands_in_upstream_md(series: Series) -> None:
    text = (series.folder / "UPSTREAM.md").read_text(encoding="utf-8")
    sections = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    subjects = [patch.subject for patch in series.patches()]
    assert [title for title in sections if title in subjects] == subjects
