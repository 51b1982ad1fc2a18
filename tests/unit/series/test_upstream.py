"""The series as patches to send: `git am` takes them and makes the same files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sample_series import FIRST, SECOND, SOURCES, Lab

from vllm_r3.cli import main
from vllm_r3.errors import R3Error
from vllm_r3.series.folder import Series, read_series
from vllm_r3.series.git import Git
from vllm_r3.series.installed import apply_series
from vllm_r3.series.patch import apply_patch
from vllm_r3.series.pinned_wheel import pinned_wheel, python_files
from vllm_r3.series.tree import commit_base, import_series, new_tree
from vllm_r3.series.upstream import SENDER, export_upstream, read_tests, try_rebase

TOPIC = FIRST.removesuffix(".patch")
SPDX = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)
TEST = f'{SPDX}"""Rows — by layer."""\n\n\ndef test_rows():\n    assert True\n'


def add_tests(lab: Lab, topic: str = TOPIC, **files: str) -> None:
    """Tests of the checkout, and their lines in tests.toml."""
    root = lab.root / "tests" / "upstream" / "v1"
    root.mkdir(parents=True)
    for name, text in files.items():
        (root / f"{name}.py").write_text(text, encoding="utf-8")
    paths = ", ".join(f'"v1/{name}.py"' for name in files)
    (lab.folder / "tests.toml").write_text(f"{topic} = [{paths}]\n")


def send(lab: Lab, sender: str = SENDER) -> Git:
    """Export the series and apply it with git am to a checkout of vLLM at the tag."""
    dest = lab.root / "out"
    export_upstream(lab.series(), SOURCES, dest, sender)
    return am(SOURCES, dest, lab.root / "vllm-checkout")


def am(sources: dict[str, bytes], dest: Path, checkout: Path) -> Git:
    with new_tree(checkout) as git:
        commit_base(git, sources, "vLLM at the tag")
        git.run("am", "-q", "--no-3way", "--keep-cr", "--keep-non-patch", *sorted(dest.iterdir()))
    return Git(checkout)


def test_git_am_makes_the_files_of_apply(patched_lab: Lab) -> None:
    add_tests(patched_lab, test_r3=TEST, __init__="")
    git = send(patched_lab)
    site = patched_lab.site()
    apply_series(patched_lab.series(), site)
    for path in (site / "vllm").rglob("*.py"):
        name = path.relative_to(site).as_posix()
        if name not in ("vllm/_version.py", "vllm/platforms/__init__.py"):  # the target's own
            assert (git.root / name).read_bytes() == path.read_bytes(), name
    assert not (git.root / "vllm/old/gone.py").exists()
    assert (git.root / "tests/v1/test_r3.py").read_text(encoding="utf-8") == TEST
    assert (git.root / "tests/v1/__init__.py").read_bytes() == b""


def test_commit_has_subject_message_and_sign_off_and_no_trailer_of_ours(patched_lab: Lab) -> None:
    git = send(patched_lab, "Zoë M <zoe@example.org>")
    assert git.text("log", "--format=%an <%ae>%n%B", "-1", "HEAD~1") == (
        "Zoë M <zoe@example.org>\n"
        "[MoE] Index captured rows by layer\n\n"
        "Why it is so, in a paragraph that says enough.\n\n"
        "Signed-off-by: Zoë M <zoe@example.org>"
    )
    assert git.text("log", "--format=%s", "-1") == (
        "[Frontend] Add the endpoint — and a subject so long that it folds"
    )


def test_upstream_number_becomes_a_related_line_and_our_trailers_a_note(patched_lab: Lab) -> None:
    file = patched_lab.folder / FIRST
    upstream = (
        b"Upstream: vllm-project/vllm#12 (a part), vllm-project/vllm#7\n vllm-project/vllm#12"
    )
    file.write_bytes(file.read_bytes().replace(b"Upstream: none", upstream))
    send(patched_lab)
    text = next((patched_lab.root / "out").glob("0001-*")).read_text()
    assert "\nSubject: [PATCH 1/2] [MoE] Index captured rows by layer\n" in text
    assert (
        f"\n\nRelated: #12, #7\nSigned-off-by: {SENDER}\n---\n\n"
        "Notes:\n    Reason: permanent\n    Upstream: vllm-project/vllm#12 (a part)"
    ) in text


def test_two_exports_are_the_same_bytes(patched_lab: Lab) -> None:
    send(patched_lab)
    again = patched_lab.root / "again"
    export_upstream(patched_lab.series(), SOURCES, again)
    assert [p.read_bytes() for p in sorted(again.iterdir())] == [
        p.read_bytes() for p in sorted((patched_lab.root / "out").iterdir())
    ]


def test_command_lists_the_patches_with_their_tests(
    patched_lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    add_tests(patched_lab, test_r3=TEST, __init__="")
    dest = patched_lab.root / "out"
    folder = ["--patches", str(patched_lab.folder)]
    assert main(["series", "export", *folder, "--upstream", str(dest)]) == 0
    out, err = capsys.readouterr()
    names = sorted(path.name for path in dest.iterdir())
    assert out == f"{names[0]}: 2 test files\n{names[1]}: no test files\n"
    assert err.startswith(f"placeholder sender: pass --sign-off, or replace '{SENDER}'")


def test_folder_with_files_is_refused(patched_lab: Lab) -> None:
    dest = patched_lab.root / "out"
    dest.mkdir()
    (dest / "notes.txt").write_text("mine")
    with pytest.raises(R3Error) as caught:
        export_upstream(patched_lab.series(), SOURCES, dest)
    assert str(caught.value) == (
        f"{dest}: expected a new or empty folder, found files; choose another one"
    )


@pytest.mark.parametrize("sender", ["Zoë", "Zoë <zoe>", "<zoe@example.org>", "Z <z@e>\nX: y <a@b>"])
def test_sender_of_another_form_is_refused(patched_lab: Lab, sender: str) -> None:
    with pytest.raises(R3Error) as caught:
        export_upstream(patched_lab.series(), SOURCES, patched_lab.root / "out", sender)
    assert str(caught.value) == f"--sign-off: expected 'Name <address>', got {sender!r}"


def test_tests_that_do_not_fit_are_refused(patched_lab: Lab) -> None:
    add_tests(patched_lab, test_r3="x = 1\n")
    file = patched_lab.root / "tests" / "upstream" / "v1" / "test_r3.py"
    index = patched_lab.folder / "tests.toml"

    def refusal() -> str:
        with pytest.raises(R3Error) as caught:
            read_tests(patched_lab.series())
        return str(caught.value)

    assert refusal() == f"{file}: expected vLLM's two SPDX lines at the top"
    file.unlink()
    assert refusal() == f"{index}: {file}: No such file or directory; run in a checkout"
    index.write_text('gone = ["v1/test_r3.py"]\n')
    assert refusal() == f"{index}: expected patches of the series, found gone.patch"


# --- another base ---


def verdicts(lab: Lab, other: dict[str, bytes | None]) -> dict[str, str]:
    sources = {path: data for path, data in {**SOURCES, **other}.items() if data is not None}
    git = import_series(lab.series(), SOURCES, lab.root / "both", sources)
    return dict(try_rebase(git, lab.series()))


@pytest.mark.parametrize(
    ("path", "before", "after", "first", "second"),
    [
        ("vllm/_version.py", b"generated", b"made", "clean", "clean"),
        ("vllm/engine.py", b"line_01", b"# one\n# two\nline_01", "clean", "clean"),
        ("vllm/engine.py", b"line_12 = 12", b"line_12 = 0", "merged", "clean"),
        ("vllm/engine.py", b"line_30 = 30", b"line_30 = 0", "clean", "conflict: vllm/engine.py"),
        ("vllm/old/gone.py", b"True", b"False", "clean", "conflict: vllm/old/gone.py"),
    ],
    ids=["elsewhere", "moved", "context", "changed-line", "file-to-remove"],
)
def test_patch_on_another_base_is_clean_merged_or_in_conflict(
    patched_lab: Lab, path: str, before: bytes, after: bytes, first: str, second: str
) -> None:
    other = {path: SOURCES[path].replace(before, after, 1)}
    assert other != {path: SOURCES[path]}
    assert verdicts(patched_lab, other) == {FIRST: first, SECOND: second}


def test_patch_on_top_of_a_conflicting_one_is_judged_by_itself(patched_lab: Lab) -> None:
    found = verdicts(patched_lab, {"vllm/r3/store.py": b"theirs = 1\n"})
    assert found == {FIRST: "conflict: vllm/r3/store.py", SECOND: "clean"}


def test_rebase_in_the_tree_gives_the_series_on_the_other_base(patched_lab: Lab) -> None:
    verdicts(
        patched_lab,
        {"vllm/engine.py": b"# one\n# two\n" + SOURCES["vllm/engine.py"], "vllm/_version.py": None},
    )
    tree = patched_lab.root / "both"
    patched_lab.git(tree, "rebase", "-q", "--onto", "r3-onto", "r3-base", "main")
    text = (tree / "vllm/engine.py").read_bytes()
    assert text.startswith(b"# one\n# two\n") and b"extra = 1\n" in text
    assert not (tree / "vllm/_version.py").exists()


# --- the series of this checkout ---


@pytest.fixture(scope="module")
def series() -> Series:
    return read_series()


def test_this_series_by_git_am_makes_the_files_of_the_strict_reader(
    series: Series, tmp_path: Path
) -> None:
    try:
        wheel = pinned_wheel(series.pin, "cpu", fetch=False)
    except R3Error as error:
        pytest.skip(f"the cpu wheel is not in the cache: {error}")
    sources = python_files(wheel)
    sent = export_upstream(series, sources, tmp_path / "out")
    git = am(sources, tmp_path / "out", tmp_path / "vllm")
    files: dict[str, bytes | None] = dict(sources)
    for patch in series.patches():
        apply_patch(patch, files)
    want = {path: data for path, data in files.items() if data is not None}
    found = git.run("ls-tree", "-r", "--name-only", "HEAD").decode().split("\n")
    assert {path for path in found if path.startswith("vllm/")} == set(want)
    assert all((git.root / path).read_bytes() == data for path, data in want.items())
    subjects = git.text("log", "--reverse", "--format=%s").splitlines()[1:]
    assert subjects == [patch.subject for patch in series.patches()]
    assert git.text("log", f"--grep=^Signed-off-by: {SENDER}", "--format=%s").count("\n") == (
        len(sent) - 1
    )


def test_no_prefix_of_this_series_uses_a_name_that_nothing_defines(
    series: Series, tmp_path: Path
) -> None:
    try:
        wheel = pinned_wheel(series.pin, "cpu", fetch=False)
    except R3Error as error:
        pytest.skip(f"the cpu wheel is not in the cache: {error}")
    files: dict[str, bytes | None] = dict(python_files(wheel))
    for number, patch in enumerate(series.patches(), 1):
        apply_patch(patch, files)
        for change in patch.changes:
            data = files[change.path]
            if data is not None and change.path.endswith(".py"):
                file = tmp_path / f"{number:02d}" / change.path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
    command = ["ruff", "check", "--isolated", "--select", "F821,F811,F401", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_patch_of_this_series_stands_in_upstream_md(series: Series) -> None:
    text = (series.folder / "UPSTREAM.md").read_text(encoding="utf-8")
    sections = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    subjects = [patch.subject for patch in series.patches()]
    assert [title for title in sections if title in subjects] == subjects


def test_new_files_of_this_series_have_vllms_licence_header(series: Series) -> None:
    for patch in series.patches():
        for change in patch.changes:
            if change.old_blob is None and change.path.endswith(".py"):
                lines = b"".join(hunk for hunk in change.hunks[0].new[:2]) if change.hunks else b""
                assert lines.decode() in (SPDX, ""), (patch.name, change.path)


def test_sent_files_pass_vllms_lint(series: Series, tmp_path: Path) -> None:
    """The rules of vLLM's own pre-commit that ruff has, on new files and tests."""
    for files in read_tests(series).values():
        for path, data in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(data)
    for patch in series.patches():
        for change in patch.changes:
            if change.old_blob is None and change.path.endswith(".py"):
                file = tmp_path / change.path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(b"".join(b"".join(hunk.new) for hunk in change.hunks))
    rules = ["--isolated", "--line-length", "88", "--target-version", "py310"]
    rules += ["--config", "lint.isort.known-first-party=['vllm']"]
    select = ["--select", "E,F,UP,B,ISC,SIM,I,G", "--ignore", "F403,F405,E731,B905,B007,UP007"]
    for command in (["check", *rules, *select], ["format", "--check", *rules]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
