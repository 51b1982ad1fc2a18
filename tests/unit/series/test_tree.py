"""Import and export: a git tree and back, no byte changed, whoever runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_series import FIRST, SECOND, SOURCES, Lab, snapshot

from vllm_r3.errors import R3Error
from vllm_r3.series.tree import export_series, import_series

HOSTILE = """
[user]
    name = Somebody Else
    email = else@example.org
[core]
    autocrlf = true
    attributesFile = {attributes}
[commit]
    gpgsign = true
[diff]
    noprefix = true
    context = 7
    algorithm = histogram
    renames = copies
    mnemonicPrefix = true
[format]
    signature = sent by a hostile configuration
    subjectPrefix = RFC
    headers = "X-Extra: yes"
    signOff = true
    numbered = true
    attach = true
    coverLetter = true
    useAutoBase = true
[am]
    threeWay = true
[mailinfo]
    scissors = true
"""


def test_export_after_import_changes_no_byte(patched_lab: Lab) -> None:
    before = snapshot(patched_lab.folder)
    patched_lab.export(patched_lab.import_tree("again"))
    assert snapshot(patched_lab.folder) == before
    assert {FIRST, SECOND} < set(before)


def test_round_trip_ignores_the_users_configuration(
    patched_lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attributes = tmp_path / "attributes"
    attributes.write_text("*.py diff=python text eol=crlf\n")
    config = tmp_path / "hostile"
    config.write_text(HOSTILE.format(attributes=attributes))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Nobody")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    tree = patched_lab.import_tree("again")
    assert export_series(tree, patched_lab.folder, write=False) == ([], [])


def test_two_imports_make_the_same_commits(patched_lab: Lab) -> None:
    heads = {
        patched_lab.git(patched_lab.import_tree(name), "rev-parse", "HEAD") for name in ("a", "b")
    }
    assert len(heads) == 1


def test_import_below_another_repository_changes_files(patched_lab: Lab) -> None:
    patched_lab.git(patched_lab.root, "init", "-q", ".")
    tree = patched_lab.import_tree("inner")
    assert b"extra = 1\n" in (tree / "vllm/engine.py").read_bytes()
    assert not (tree / "vllm/old/gone.py").exists()
    assert export_series(tree, patched_lab.folder, write=False) == ([], [])


def test_tree_without_a_repository_of_its_own_is_refused(patched_lab: Lab) -> None:
    patched_lab.git(patched_lab.root, "init", "-q", ".")
    plain = patched_lab.root / "plain"
    plain.mkdir()
    with pytest.raises(R3Error, match=r"expected the root of a git tree .* found no \.git there"):
        export_series(plain, patched_lab.folder)


def test_import_of_a_bad_patch_leaves_nothing(patched_lab: Lab) -> None:
    path = patched_lab.folder / SECOND
    path.write_bytes(path.read_bytes().replace(b"-line_30 = 30", b"-line_30 = 31"))
    with pytest.raises(R3Error) as caught:
        patched_lab.import_tree("broken")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"patch 2 of 2: {SECOND} does not apply: git am failed in ")
    assert "error: patch failed: vllm/engine.py:28" in str(caught.value)
    assert lines[-1].endswith("; see 'Resolve a conflict' in patches/README.md")
    assert [p.name for p in patched_lab.root.iterdir() if "broken" in p.name] == []


def test_change_that_git_takes_but_the_patch_does_not_record_is_refused(patched_lab: Lab) -> None:
    path = patched_lab.folder / FIRST
    path.write_bytes(path.read_bytes().replace(b"+line_10 = 100", b"+line_10 = 101"))
    with pytest.raises(R3Error) as caught:
        patched_lab.import_tree("broken")
    assert str(caught.value) == (
        f"patch 1 of 2: {FIRST} does not apply: git made other blobs than it records of "
        "vllm/engine.py; see 'Resolve a conflict' in patches/README.md"
    )


def test_import_into_a_folder_in_use_is_refused(patched_lab: Lab) -> None:
    tree = patched_lab.root / "used"
    tree.mkdir()
    (tree / "notes.txt").write_text("mine")
    with pytest.raises(R3Error, match="expected a new or empty folder, found files"):
        import_series(patched_lab.series(), SOURCES, tree)
    assert (tree / "notes.txt").read_text() == "mine"


def test_new_patch_goes_below_the_heading_of_the_one_before(patched_lab: Lab) -> None:
    lines = f"# capture\n{FIRST}\n\n# answers\n# two lines\n{SECOND}\n"
    (patched_lab.folder / "series").write_text(lines)
    tree = patched_lab.import_tree()
    patched_lab.commit(tree, "Third", {"vllm/third.py": b"3\n"})
    patched_lab.export(tree)
    assert (patched_lab.folder / "series").read_text() == lines + "third.patch\n"


def test_dropped_commit_removes_its_file_and_its_heading(patched_lab: Lab) -> None:
    lines = f"# capture\n{FIRST}\n\n# answers\n{SECOND}\n"
    (patched_lab.folder / "series").write_text(lines)
    tree = patched_lab.import_tree()
    patched_lab.git(tree, "reset", "-q", "--hard", "HEAD~1")
    patched_lab.export(tree)
    assert (patched_lab.folder / "series").read_text() == f"# capture\n{FIRST}\n"
    assert not (patched_lab.folder / SECOND).exists()


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("fixup! Third", "commit 'fixup! Third' is a fixup: run 'git rebase --autosquash' first"),
        (
            "[MoE] index captured rows: by layer",
            "commit '[MoE] index captured rows: by layer': expected a subject of its own, "
            f"{FIRST} is taken",
        ),
    ],
    ids=["fixup", "same-name"],
)
def test_commit_that_is_no_patch_of_its_own_is_refused(
    patched_lab: Lab, subject: str, message: str
) -> None:
    tree = patched_lab.import_tree()
    patched_lab.commit(tree, subject, {"vllm/third.py": b"3\n"})
    with pytest.raises(R3Error) as caught:
        export_series(tree, patched_lab.folder)
    assert str(caught.value) == message


def test_uncommitted_change_is_refused_by_name(patched_lab: Lab) -> None:
    tree = patched_lab.import_tree()
    (tree / "vllm/engine.py").write_text("")
    (tree / "vllm/forgotten.py").write_text("")
    with pytest.raises(R3Error, match=r"found 2 that are not: vllm/engine.py, vllm/forgotten.py$"):
        export_series(tree, patched_lab.folder)


def test_merge_is_refused(patched_lab: Lab) -> None:
    tree = patched_lab.import_tree()
    patched_lab.git(tree, "checkout", "-q", "-b", "side", "HEAD~1")
    patched_lab.commit(tree, "Side", {"vllm/side.py": b"1\n"})
    patched_lab.git(tree, "checkout", "-q", "main")
    patched_lab.git(tree, "merge", "-q", "--no-edit", "side")
    with pytest.raises(R3Error, match="expected one line of commits, found the merge"):
        export_series(tree, patched_lab.folder)
