"""verify finds every kind of fault, all in one run, and no fault where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sample_series import BODY, SOURCES, Lab

from vllm_r3.series.findings import Finding, counted
from vllm_r3.series.folder import reorder
from vllm_r3.series.hashes import read_hashes
from vllm_r3.series.pin import read_pin
from vllm_r3.series.prefixes import can_import, import_prefixes
from vllm_r3.series.verify import verify_folder, verify_sources

FIRST = "moe_index_captured_rows_by_layer.patch"
SECOND = "frontend_add_the_endpoint_and_a_subject_so_long_that_it_folds.patch"


def verify(lab: Lab) -> list[Finding]:
    findings, patches = verify_folder(lab.folder, read_pin(lab.folder))
    return findings + list(verify_sources(patches, SOURCES, read_hashes(lab.folder)))


def phrases(lab: Lab) -> set[tuple[str, str]]:
    return {(finding.phrase, finding.where) for finding in verify(lab)}


def test_exported_series_has_no_finding(patched_lab: Lab) -> None:
    assert verify(patched_lab) == []


@pytest.mark.parametrize("name", [FIRST, SECOND, "hashes.toml"])
def test_every_one_byte_change_is_found(patched_lab: Lab, name: str) -> None:
    """Of the hash file only the hashes: its comment line says nothing."""
    path = patched_lab.folder / name
    data = path.read_bytes()
    start = data.index(b"[patches]") if name == "hashes.toml" else 0
    for at in range(start, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            found = verify(patched_lab)
        except Exception as error:
            assert name == "hashes.toml" and "not valid TOML" in str(error), (at, error)
            continue
        assert found, f"byte {at} of {name}"


def test_all_findings_come_in_one_run(patched_lab: Lab) -> None:
    folder = patched_lab.folder
    (folder / "old_fix.patch").write_text("")
    (folder / "series").write_text(f"{FIRST}\n{SECOND}\n{SECOND}\nlost.patch\n")
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes().replace(b"Reason:", b"reason:"))
    (folder / "locks" / "cuda.txt").unlink()
    assert phrases(patched_lab) == {
        ("twice", SECOND),
        ("missing", "lost.patch"),
        ("unlisted", "old_fix.patch"),
        ("missing", "locks/cuda.txt"),
        ("differs", FIRST),
        ("no reason", FIRST),
    }


def test_swapped_order_is_found(patched_lab: Lab) -> None:
    (patched_lab.folder / "series").write_text(f"{SECOND}\n{FIRST}\n")
    assert ("rejected", SECOND) in phrases(patched_lab)


def test_dropped_line_of_the_order_is_found(patched_lab: Lab) -> None:
    (patched_lab.folder / "series").write_text(f"{FIRST}\n")
    found = phrases(patched_lab)
    assert {("unlisted", SECOND), ("stale hash", SECOND), ("differs", "vllm/engine.py")} <= found


def test_sources_that_are_not_the_pinned_ones_are_found(patched_lab: Lab) -> None:
    findings, patches = verify_folder(patched_lab.folder, read_pin(patched_lab.folder))
    other = {**SOURCES, "vllm/odd.py": b"other\n"}
    found = list(verify_sources(patches, other, read_hashes(patched_lab.folder)))
    assert findings == []
    assert [(f.phrase, f.where) for f in found] == [("rejected", SECOND)]


@pytest.mark.parametrize(
    ("body", "phrase"),
    [
        (BODY.replace("Reason: permanent", "Reason: temporary"), "no exit"),
        (BODY.replace("Reason: permanent", "Reason: because"), "bad reason"),
        (BODY.replace("Reason: permanent\n", ""), "no reason"),
        (BODY.replace("Upstream: none\n", ""), "no upstream"),
        (BODY.replace("\nTested: by the unit tests", ""), "no tests"),
        (BODY.split("\n\n")[1], "no message"),
        (f"Index: cut here\n\n{BODY}", "cut"),
    ],
)
def test_message_without_what_it_must_say_is_found(lab: Lab, body: str, phrase: str) -> None:
    tree = lab.import_tree()
    lab.commit(tree, "Third", {"vllm/third.py": b"x = 3\n"}, body)
    lab.export(tree)
    assert phrases(lab) == {(phrase, "third.patch")}


@pytest.mark.parametrize("path", ["vllm/platforms/__init__.py", "vllm/third/new.py"])
def test_patch_of_a_file_that_differs_between_the_wheels_is_found(lab: Lab, path: str) -> None:
    tree = lab.import_tree()
    lab.commit(tree, "Third", {path: b"x = 3\n"})
    lab.export(tree)
    assert phrases(lab) == {("one target", "third.patch")}


def test_prefix_that_does_not_compile_is_found_though_the_whole_does(lab: Lab) -> None:
    tree = lab.import_tree()
    lab.commit(tree, "Broken", {"vllm/third.py": b"x = (\n"})
    lab.commit(tree, "Mended", {"vllm/third.py": b"x = 3\n"})
    lab.export(tree)
    assert phrases(lab) == {("no compile", "broken.patch")}


def test_renamed_patch_file_is_found(patched_lab: Lab) -> None:
    folder = patched_lab.folder
    (folder / FIRST).rename(folder / "0001.patch")
    (folder / "series").write_text(f"0001.patch\n{SECOND}\n")
    found = phrases(patched_lab)
    assert found == {("no hash", "0001.patch"), ("misnamed", "0001.patch"), ("stale hash", FIRST)}


def import_all(lab: Lab) -> list[str]:
    pin = read_pin(lab.folder)
    patches = lab.series().patches()
    wheel, pinned = lab.wheels["cpu"], pin.wheels["cpu"]
    python, scratch = Path(sys.executable), lab.root / "scratch"
    found = import_prefixes(patches, wheel, pinned, python, scratch)
    words = [f"{finding.where}: {finding.detail}" for finding in found]
    assert list(scratch.iterdir()) == []
    return words


def test_every_prefix_that_imports_gives_no_finding(patched_lab: Lab) -> None:
    assert import_all(patched_lab) == []


def test_prefix_that_does_not_import_is_found_though_the_whole_does(lab: Lab) -> None:
    tree = lab.import_tree()
    lab.commit(tree, "Early", {"vllm/third.py": b"from vllm.fourth import x\n"})
    lab.commit(tree, "Late", {"vllm/fourth.py": b"x = 4\n"})
    lab.export(tree)
    assert phrases(lab) == set()
    assert import_all(lab) == ["early.patch: ModuleNotFoundError: No module named 'vllm.fourth'"]


def test_import_that_ends_the_process_is_found(lab: Lab) -> None:
    tree = lab.import_tree()
    lab.commit(tree, "Dies", {"vllm/third.py": b"import os\nos._exit(3)\n"})
    lab.commit(tree, "Lives", {"vllm/third.py": b"x = 3\n"})
    lab.export(tree)
    assert import_all(lab) == ["dies.patch: the import ended the process with status 768"]


def test_prefix_sees_no_module_of_the_tooling(lab: Lab) -> None:
    tree = lab.import_tree()
    lab.commit(tree, "Asks", {"vllm/third.py": b"import patchfile\n"})
    lab.export(tree)
    assert import_all(lab) == ["asks.patch: ModuleNotFoundError: No module named 'patchfile'"]


def test_interpreter_without_torch_cannot_import() -> None:
    assert can_import(Path("/bin/false")) is False


def test_finding_and_count_have_the_fixed_form() -> None:
    findings = [Finding("differs", "a.patch"), Finding("no reason", "b.patch", "why")]
    expected = ["  differs     a.patch", "  no reason   b.patch: why"]
    assert [str(finding) for finding in findings] == expected
    assert [counted(findings[:n]) for n in range(3)] == ["0 problems", "1 problem", "2 problems"]


@pytest.mark.parametrize(
    ("lines", "order", "expected"),
    [
        ([], ["a"], ("a",)),
        (["# one", "a", "", "# two", "b"], ["b", "a"], ("", "# two", "b", "# one", "a")),
        (["# one", "a", "b"], ["new", "a", "b"], ("# one", "new", "a", "b")),
        (["# one", "a", "# two", "b"], ["a"], ("# one", "a")),
        (["# nothing yet"], ["a"], ("# nothing yet", "a")),
    ],
)
def test_headings_follow_their_patches(
    lines: list[str], order: list[str], expected: tuple[str, ...]
) -> None:
    assert reorder(lines, order) == expected
