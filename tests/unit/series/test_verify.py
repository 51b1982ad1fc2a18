"""verify finds every kind of fault, all in one run, and no fault where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sample_series import BODY, FIRST, SECOND, SOURCES, Lab

from vllm_r3.series import verify as verify_module
from vllm_r3.series.folder import read_pin, reorder
from vllm_r3.series.verify import (
    Finding,
    import_prefixes,
    verify_folder,
    verify_sources,
)


def verify(lab: Lab) -> list[Finding]:
    findings, patches = verify_folder(lab.folder, read_pin(lab.folder))
    return findings + list(verify_sources(patches, SOURCES))


def phrases(lab: Lab) -> set[tuple[str, str]]:
    return {(finding.phrase, finding.where) for finding in verify(lab)}


def test_exported_series_has_no_finding(patched_lab: Lab) -> None:
    assert verify(patched_lab) == []


@pytest.mark.parametrize("name", [FIRST, SECOND, "SHA256SUMS"])
def test_every_one_byte_change_is_found(patched_lab: Lab, name: str) -> None:
    path = patched_lab.folder / name
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert verify(patched_lab), f"byte {at} of {name}"


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
    assert {("rejected", SECOND), ("differs", "SHA256SUMS")} <= phrases(patched_lab)


def test_dropped_line_of_the_order_is_found(patched_lab: Lab) -> None:
    (patched_lab.folder / "series").write_text(f"{FIRST}\n")
    found = phrases(patched_lab)
    assert found == {("unlisted", SECOND), ("differs", "SHA256SUMS")}


def test_sources_that_are_not_the_pinned_ones_are_found(patched_lab: Lab) -> None:
    findings, patches = verify_folder(patched_lab.folder, read_pin(patched_lab.folder))
    other = {**SOURCES, "vllm/odd.py": b"other\n"}
    found = list(verify_sources(patches, other))
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
    assert found == {("differs", "0001.patch"), ("misnamed", "0001.patch")}


def import_all(lab: Lab) -> list[str]:
    python, scratch = Path(sys.executable), lab.root / "scratch"
    found = import_prefixes(lab.series(), "cpu", lab.wheels["cpu"], python, scratch)
    words = [f"{finding.where}: {finding.detail}" for finding in found]
    assert [path.name for path in scratch.iterdir()] == ["imported-prefixes"]
    return words


def test_every_prefix_that_imports_gives_no_finding(patched_lab: Lab) -> None:
    assert import_all(patched_lab) == []


def test_prefix_is_imported_again_only_if_something_changed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    probe = verify_module._probe

    def counted(states, python, root):
        states = list(states)
        asked.extend(state["modules"] for state in states if state["modules"])
        return probe(iter(states), python, root)

    monkeypatch.setattr(verify_module, "_probe", counted)
    tree = lab.import_tree()
    for number in range(3):
        lab.commit(tree, f"Patch {number}", {f"vllm/p{number}.py": b"x = 1\n"})
    lab.export(tree)
    assert import_all(lab) == []
    assert (len(asked), import_all(lab), len(asked)) == (4, [], 4)
    lab.commit(tree, "Patch 3", {"vllm/p3.py": b"x = 1\n"})
    lab.export(tree)
    assert (import_all(lab), len(asked)) == ([], 5)
    (lab.folder / "locks" / "cpu.txt").write_text("other==1\n")
    assert (import_all(lab), len(asked)) == ([], 10)


def test_prefix_that_does_not_import_is_found_though_the_whole_does(lab: Lab) -> None:
    tree = lab.import_tree()
    lab.commit(tree, "Early", {"vllm/third.py": b"from vllm.fourth import x\n"})
    lab.commit(tree, "Late", {"vllm/fourth.py": b"x = 4\n"})
    lab.export(tree)
    assert phrases(lab) == set()
    for _ in range(2):  # a failure is not remembered
        assert import_all(lab) == [
            "early.patch: ModuleNotFoundError: No module named 'vllm.fourth'"
        ]


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


def test_finding_has_the_fixed_form() -> None:
    findings = [Finding("differs", "a.patch"), Finding("no reason", "b.patch", "why")]
    expected = ["  differs     a.patch", "  no reason   b.patch: why"]
    assert [str(finding) for finding in findings] == expected


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
