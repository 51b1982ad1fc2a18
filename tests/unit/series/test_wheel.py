"""The patched wheel: right RECORD, honest metadata, the same bytes every time."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from sample_series import Lab, snapshot

from vllm_r3.errors import R3Error
from vllm_r3.series.distinfo import parse_record, patched_tags, record_row
from vllm_r3.series.installed import apply_series, read_status, revert_series
from vllm_r3.series.wheel import repack, requirements

NAMES = {
    "cpu": "vllm-0.21.0+r3.1.cpu-cp38-abi3-manylinux_2_28_x86_64.whl",
    "cuda": "vllm-0.21.0+r3.1-cp38-abi3-manylinux_2_24_x86_64.whl",
}
BOTH = pytest.mark.parametrize("target", ["cpu", "cuda"])


def build(lab: Lab, target: str = "cpu", dest: str = "dist") -> Path:
    return repack(lab.series(), target, lab.wheels[target], lab.root / dest)


@BOTH
def test_record_fits_every_member(patched_lab: Lab, target: str) -> None:
    path = build(patched_lab, target)
    assert path.name == NAMES[target]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        record = archive.namelist()[-1]
        rows = parse_record(archive.read(record))
        assert record.endswith(".dist-info/RECORD")
        assert set(rows) == set(archive.namelist())
        for name in set(rows) - {record}:
            assert rows[name] == record_row(archive.read(name))


@BOTH
def test_two_builds_are_byte_identical_on_every_host(
    patched_lab: Lab, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = patched_lab.wheels[target]
    before = pinned.read_bytes()
    first = build(patched_lab, target, "one").read_bytes()
    os.utime(pinned, (1, 1))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    path = build(patched_lab, target, "wheels")
    assert (path.read_bytes() == first, pinned.read_bytes() == before) == (True, True)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
    # no compressor, whose output differs between builds of zlib
    assert {info.compress_type for info in members.values()} == {zipfile.ZIP_STORED}
    assert members["vllm/_C.abi3.so"].external_attr >> 16 == 0o100755
    assert members["vllm/r3/store.py"].external_attr >> 16 == 0o100644


@pytest.mark.parametrize(
    ("epoch", "date"),
    [(None, (1980, 1, 1, 0, 0, 0)), ("0", (1980, 1, 1, 0, 0, 0)), ("1780000000", (2026, 5, 28))],
)
def test_source_date_epoch_is_every_members_date(
    patched_lab: Lab, monkeypatch: pytest.MonkeyPatch, epoch: str | None, date: tuple[int, ...]
) -> None:
    if epoch is not None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    with zipfile.ZipFile(build(patched_lab)) as archive:
        assert {info.date_time[: len(date)] for info in archive.infolist()} == {date}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")
    with pytest.raises(R3Error) as caught:
        build(patched_lab, dest="again")
    assert str(caught.value) == "SOURCE_DATE_EPOCH: expected seconds since 1970, found 'today'"
    assert list((patched_lab.root / "again").iterdir()) == []


def test_metadata_is_that_of_vllm_in_our_version(patched_lab: Lab) -> None:
    with zipfile.ZipFile(build(patched_lab)) as archive:
        info = "vllm-0.21.0+r3.1.cpu.dist-info"
        assert archive.read(f"{info}/METADATA").decode() == (
            "Metadata-Version: 2.4\nName: vllm\nVersion: 0.21.0+r3.1.cpu\n"
            "Requires-Dist: torch==2.11.0\n\nVersion: in the text\n"
        )
        assert archive.read(f"{info}/WHEEL").decode() == (
            "Wheel-Version: 1.0\nGenerator: vllm-r3\nTag: cp38-abi3-manylinux_2_28_x86_64\n"
        )
        assert b"vllm = vllm:main" in archive.read(f"{info}/entry_points.txt")
        assert {n.split("/")[0] for n in archive.namelist()} == {"vllm", info}


def test_wheel_tags_are_every_combination_of_the_file_name() -> None:
    made = patched_tags(b"Generator: x\nBuild: 1\nTag: a-b-c\n", "vllm-1-py2.py3-none-any.whl")
    assert made == b"Generator: vllm-r3\nTag: py2-none-any\nTag: py3-none-any\n"


@BOTH
def test_installed_wheel_holds_the_same_code_as_apply(patched_lab: Lab, target: str) -> None:
    site = patched_lab.site(target)
    apply_series(patched_lab.series(), site)
    patched_lab.wheels[target] = build(patched_lab, target)
    unpacked = patched_lab.site(target, "from-wheel")
    for name in ("vllm/old/gone.py", "vllm/r3/store.py", "vllm/r3/__init__.py"):
        assert (unpacked / name).exists() == (site / name).exists()
    assert snapshot(unpacked / "vllm") == snapshot(site / "vllm")


def test_member_that_differs_from_record_is_refused_by_name(patched_lab: Lab) -> None:
    source = patched_lab.wheels["cpu"]
    bad = patched_lab.root / source.name
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(bad, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data + b"#" if name == "vllm/odd.py" else data)
        new.writestr("vllm/extra.py", b"")
    with pytest.raises(R3Error) as caught:
        repack(patched_lab.series(), "cpu", bad, patched_lab.root / "dist")
    assert str(caught.value) == (
        f"{bad} does not fit its RECORD: vllm/extra.py is not listed; vllm/odd.py differs; "
        "download it again"
    )


def test_patch_that_does_not_apply_leaves_no_wheel(patched_lab: Lab) -> None:
    path = patched_lab.folder / "moe_index_captured_rows_by_layer.patch"
    path.write_bytes(path.read_bytes().replace(b"+extra = 1", b"+extra = 2"))
    with pytest.raises(R3Error, match="patch 1 of 2: moe_index_captured_rows_by_layer.patch does"):
        build(patched_lab)
    assert not (patched_lab.root / "dist").exists()


def test_series_of_an_installed_wheel_is_not_changed_in_place(patched_lab: Lab) -> None:
    series = patched_lab.series()
    patched_lab.wheels["cpu"] = build(patched_lab)
    site = patched_lab.site()
    state, found, modified = read_status(series, site)
    assert (state, found.version, modified) == ("patched", "0.21.0+r3.1.cpu", [])
    assert found.applied is not None and found.applied.series == series.hash
    assert apply_series(series, site) == ("0.21.0+r3.1.cpu", 0)
    tree = patched_lab.import_tree()
    patched_lab.commit(tree, "Third", {"vllm/third.py": b"3\n"})
    patched_lab.export(tree)
    for verb, act in (
        ("apply", lambda: apply_series(patched_lab.series(), site)),
        ("revert", lambda: revert_series(site)),
    ):
        with pytest.raises(R3Error) as caught:
            act()
        assert str(caught.value) == (
            f"{site}: cannot {verb}: vLLM 0.21.0+r3.1.cpu was installed as a patched wheel; "
            "install the wheel that you want instead"
        )


def test_requirements_of_the_lock_are_those_of_the_patched_wheel(lab: Lab) -> None:
    assert requirements(lab.wheels["cuda"], "cuda") == ["torch==2.11.0"]
    assert requirements(lab.wheels["cpu"], "cpu")[0] == "torch==2.11.0"
