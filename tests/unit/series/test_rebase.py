"""On another base each patch is clean, at an offset, or in conflict at a named hunk."""

from __future__ import annotations

from sample_series import SOURCES, Lab

from vllm_r3.series.importing import import_series
from vllm_r3.series.rebase import try_rebase

FIRST = "moe_index_captured_rows_by_layer.patch"
SECOND = "frontend_add_the_endpoint_and_a_subject_so_long_that_it_folds.patch"


def verdicts(lab: Lab, other: dict[str, bytes]) -> list[tuple[str, str, str, int]]:
    found = try_rebase(lab.series().patches(), {**SOURCES, **other})
    return [(v.patch, v.kind, v.path, v.hunk) for v in found]


def test_same_base_is_clean(patched_lab: Lab) -> None:
    assert verdicts(patched_lab, {}) == [(FIRST, "clean", "", 0), (SECOND, "clean", "", 0)]


def test_change_far_from_the_hunks_is_clean(patched_lab: Lab) -> None:
    other = {"vllm/engine.py": SOURCES["vllm/engine.py"] + b"more = 1\n"}
    assert [kind for _, kind, _, _ in verdicts(patched_lab, other)] == ["clean", "clean"]


def test_moved_lines_are_an_offset(patched_lab: Lab) -> None:
    other = {"vllm/engine.py": b"# one\n# two\n" + SOURCES["vllm/engine.py"]}
    found = try_rebase(patched_lab.series().patches(), {**SOURCES, **other})
    assert [str(v) for v in found] == [
        f"  offset      {FIRST}: 1 hunks moved, most +2 in vllm/engine.py",
        f"  offset      {SECOND}: 1 hunks moved, most +2 in vllm/engine.py",
    ]


def test_changed_context_is_a_conflict_at_its_hunk(patched_lab: Lab) -> None:
    other = {"vllm/engine.py": SOURCES["vllm/engine.py"].replace(b"line_29 = 29", b"line_29 = 0")}
    found = verdicts(patched_lab, other)
    assert found == [(FIRST, "clean", "", 0), (SECOND, "conflict", "vllm/engine.py", 1)]


def test_patch_on_top_of_a_conflicting_one_is_reported_too(patched_lab: Lab) -> None:
    tree = patched_lab.import_tree()
    patched_lab.commit(tree, "Third", {"vllm/r3/store.py": b"rows = 0\n"})
    patched_lab.export(tree)
    other = {"vllm/engine.py": b"rewritten = 1\n"}
    assert [(kind, path) for _, kind, path, _ in verdicts(patched_lab, other)] == [
        ("conflict", "vllm/engine.py"),
        ("conflict", "vllm/engine.py"),
        ("conflict", "vllm/r3/store.py"),
    ]
    last = try_rebase(patched_lab.series().patches(), {**SOURCES, **other})[-1]
    note = f"(and {FIRST}, which was left out, changes this file first)"
    assert last.detail == f"the file is gone {note}"


def test_file_that_is_gone_or_new_there_is_a_conflict(patched_lab: Lab) -> None:
    sources = {path: data for path, data in SOURCES.items() if path != "vllm/engine.py"}
    found = try_rebase(patched_lab.series().patches(), {**sources, "vllm/r3/store.py": b""})
    assert str(found[0]) == f"  conflict    {FIRST}: vllm/engine.py hunk 1: the file is gone"
    found = try_rebase(patched_lab.series().patches(), {**SOURCES, "vllm/r3/store.py": b""})
    assert found[0].detail == "the new file is there already"


def test_rebase_in_the_tree_gives_the_series_on_the_other_base(patched_lab: Lab) -> None:
    tree = patched_lab.root / "both"
    moved = b"# one\n# two\n" + SOURCES["vllm/engine.py"]
    sources = {path: data for path, data in SOURCES.items() if path != "vllm/_version.py"}
    import_series(patched_lab.series(), SOURCES, tree, {**sources, "vllm/engine.py": moved})
    patched_lab.git(tree, "rebase", "-q", "--onto", "r3-onto", "r3-base", "main")
    text = (tree / "vllm/engine.py").read_bytes()
    assert text.startswith(b"# one\n# two\n") and b"extra = 1\n" in text
    assert not (tree / "vllm/_version.py").exists()
