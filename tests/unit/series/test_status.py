"""What an installation is: stock, patched with which series, or modified with which files."""

from __future__ import annotations

from sample_series import Lab

from vllm_r3.series.apply import apply_series
from vllm_r3.series.status import read_status
from vllm_r3.wheel.repack import repack


def test_unpacked_wheel_is_stock(patched_lab: Lab) -> None:
    status = read_status(patched_lab.series(), patched_lab.site())
    assert (status.state, status.version, status.files) == ("stock", "0.21.0", ())


def test_patched_names_its_series(patched_lab: Lab) -> None:
    site = patched_lab.site()
    apply_series(patched_lab.series(), site)
    status = read_status(patched_lab.series(), site)
    assert (status.state, status.num_patches, status.current) == ("patched", 2, True)
    assert status.series == patched_lab.series().hash


def test_series_that_moved_on_is_not_current(patched_lab: Lab) -> None:
    site = patched_lab.site()
    apply_series(patched_lab.series(), site)
    tree = patched_lab.import_tree()
    patched_lab.commit(tree, "Third", {"vllm/third.py": b"3\n"})
    patched_lab.export(tree)
    status = read_status(patched_lab.series(), site)
    assert (status.state, status.current) == ("patched", False)


def test_modified_names_every_file(patched_lab: Lab) -> None:
    site = patched_lab.site()
    apply_series(patched_lab.series(), site)
    (site / "vllm/__init__.py").write_text("# no patch touches this one\n")
    (site / "vllm/r3/store.py").unlink()
    (site / "vllm/old").mkdir(exist_ok=True)
    (site / "vllm/old/gone.py").write_text("# back\n")
    status = read_status(patched_lab.series(), site)
    expected = ("vllm/__init__.py", "vllm/old/gone.py", "vllm/r3/store.py")
    assert (status.state, status.files) == ("modified", expected)


def test_patched_by_hand_is_modified_not_stock(patched_lab: Lab) -> None:
    site = patched_lab.site()
    (site / "vllm/r3").mkdir()
    (site / "vllm/r3/store.py").write_text("rows = -1\n")
    status = read_status(patched_lab.series(), site)
    assert (status.state, status.files) == ("modified", ("vllm/r3/store.py",))


def test_installed_patched_wheel_is_patched(patched_lab: Lab) -> None:
    series = patched_lab.series()
    patched_lab.wheels["cpu"] = repack(
        series, "cpu", patched_lab.wheels["cpu"], patched_lab.root / "dist"
    ).path
    status = read_status(series, patched_lab.site("cpu"))
    assert (status.state, status.version, status.current) == ("patched", "0.21.0+r3.1.cpu", True)
