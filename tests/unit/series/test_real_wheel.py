"""The series of this checkout on the pinned wheels themselves."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from sample_series import snapshot

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import Series, read_series
from vllm_r3.series.installed import Site, apply_series, read_site, read_status, revert_series
from vllm_r3.series.patch import blobs
from vllm_r3.series.pinned_wheel import pinned_wheel, python_files
from vllm_r3.series.tree import import_series, plan_export
from vllm_r3.series.verify import verify_folder, verify_sources


@pytest.fixture(scope="module")
def series() -> Series:
    return read_series()


def wheel_of(series: Series, target: str) -> Path:
    """The wheel from the cache; `build.sh test` fetches both."""
    try:
        return pinned_wheel(series.pin, target, fetch=False)
    except R3Error as error:
        pytest.skip(f"the {target} wheel is not in the cache: {error}")


@pytest.fixture(params=["cpu", "cuda"])
def wheel(series: Series, request: pytest.FixtureRequest) -> Path:
    return wheel_of(series, request.param)


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Site:
    """The Python files and the metadata of the wheel; the compiled libraries stay in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".py") or ".dist-info/" in n]
        archive.extractall(tmp_path / "site-packages", names)
    return read_site(tmp_path / "site-packages")


def test_series_has_no_finding(series: Series, wheel: Path) -> None:
    findings, patches = verify_folder(series.folder, series.pin)
    findings += verify_sources(patches, python_files(wheel))
    assert [str(finding) for finding in findings] == []


def test_import_then_export_changes_no_byte(series: Series, wheel: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    import_series(series, python_files(wheel), tree)
    plan = plan_export(tree, series.folder)
    assert (plan.changed, plan.removed) == ([], [])


def test_apply_then_revert_gives_the_wheels_bytes(series: Series, site: Site) -> None:
    before = snapshot(site.root)
    assert read_status(series, site.root).state == "stock"
    version = series.pin.patched_version(site.target)
    num_files = len(blobs(series.patches())) + 1
    assert apply_series(series, site.root) == (version, num_files)
    assert apply_series(series, site.root) == (version, 0)
    assert read_status(series, site.root).state == "patched"
    revert_series(site.root)
    assert snapshot(site.root) == before


def test_wheels_differ_in_the_pinned_files_alone(series: Series) -> None:
    cpu = python_files(wheel_of(series, "cpu"))
    cuda = python_files(wheel_of(series, "cuda"))
    assert sorted(set(cpu) - set(cuda)) == []
    folders = {"/".join(path.split("/")[:2]) + "/" for path in set(cuda) - set(cpu)}
    differ = {path for path in cpu if cpu[path] != cuda[path]}
    assert folders | differ == set(series.pin.target_specific)
