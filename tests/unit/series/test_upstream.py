"""The series as patches to send: `git am` takes them and makes the same files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sample_series import SOURCES, Lab

from vllm_r3.cli import main
from vllm_r3.errors import R3Error
from vllm_r3.series.apply import apply_series
from vllm_r3.series.folder import Series, apply_patch, read_series
from vllm_r3.series.git import Git
from vllm_r3.series.importing import commit_base
from vllm_r3.series.source import pinned_wheel, python_files
from vllm_r3.series.upstream import (
    SENDER,
    Sent,
    read_tests,
    upstream_patches,
    write_upstream,
)

FIRST = "moe_index_captured_rows_by_layer"
SPDX = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)
TEST = f'{SPDX}"""Rows — by layer."""\n\n\ndef test_rows():\n    assert True\n'


def add_test(lab: Lab, topic: str = FIRST, path: str = "tests/v1/test_r3.py", text: str = TEST):
    """A test of the checkout, and its line in tests.toml."""
    index = lab.folder / "tests.toml"
    number = index.read_text().count("=") if index.exists() else 0
    file = lab.root / "tests" / f"own_{number}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    title = "" if index.exists() and f"[{topic}]" in index.read_text() else f"[{topic}]\n"
    with index.open("a") as lines:
        lines.write(f'{title}"{path}" = "tests/{file.name}"\n')


def checkout(sources: dict[str, bytes], tree: Path) -> Git:
    """A git tree with the sources, as a checkout of vLLM at the tag has them."""
    tree.mkdir()
    git = Git(tree)
    git.init()
    commit_base(git, sources, "vLLM at the tag")
    return git


def am(git: Git, sent: list[Sent], *options: str) -> None:
    for patch in sent:
        git.run("am", "-q", "--no-3way", "--keep-cr", *options, data=patch.data)


def test_git_am_makes_the_files_of_apply(patched_lab: Lab) -> None:
    add_test(patched_lab)
    git = checkout(SOURCES, patched_lab.root / "vllm-checkout")
    am(git, upstream_patches(patched_lab.series()), "--keep-non-patch")
    site = patched_lab.site()
    apply_series(patched_lab.series(), site)
    for path in (site / "vllm").rglob("*.py"):
        name = path.relative_to(site).as_posix()
        if name not in ("vllm/_version.py", "vllm/platforms/__init__.py"):  # the target's own
            assert (git.root / name).read_bytes() == path.read_bytes(), name
    assert not (git.root / "vllm/old/gone.py").exists()
    assert (git.root / "tests/v1/test_r3.py").read_text(encoding="utf-8") == TEST


def test_commit_has_subject_message_and_sign_off_and_no_trailer_of_ours(patched_lab: Lab) -> None:
    git = checkout(SOURCES, patched_lab.root / "vllm-checkout")
    am(git, upstream_patches(patched_lab.series(), "Zoë M <zoe@example.org>"), "--keep-non-patch")
    assert git.text("log", "--format=%an <%ae>%n%B", "-1", "HEAD~1") == (
        "Zoë M <zoe@example.org>\n"
        "[MoE] Index captured rows by layer\n\n"
        "Why it is so, in a paragraph that says enough.\n\n"
        "Signed-off-by: Zoë M <zoe@example.org>"
    )
    assert git.text("log", "--format=%s", "-1") == (
        "[Frontend] Add the endpoint — and a subject so long that it folds"
    )


def test_upstream_number_becomes_a_related_line(patched_lab: Lab) -> None:
    name = f"{FIRST}.patch"
    file = patched_lab.folder / name
    said = b"Upstream: vllm-project/vllm#12 (a part), vllm-project/vllm#7\n vllm-project/vllm#12"
    file.write_bytes(file.read_bytes().replace(b"Upstream: none", said))
    text = upstream_patches(patched_lab.series())[0].data.decode()
    assert f"\n\nRelated: #12, #7\nSigned-off-by: {SENDER}\n---\nReason: permanent\n" in text


def test_command_lists_the_patches_with_their_tests(
    patched_lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    add_test(patched_lab)
    add_test(patched_lab, path="tests/v1/__init__.py", text="")
    dest = patched_lab.root / "out"
    folder = ["--patches", str(patched_lab.folder)]
    assert main(["series", "export", *folder, "--upstream", str(dest)]) == 0
    out, err = capsys.readouterr()
    names = sorted(path.name for path in dest.iterdir())
    assert out == f"{names[0]}: 2 test files\n{names[1]}: no test files\n"
    assert err.startswith(f"placeholder sender: pass --sign-off, or replace '{SENDER}'")
    git = checkout(SOURCES, patched_lab.root / "vllm-checkout")
    am(git, upstream_patches(patched_lab.series()))
    assert (git.root / "tests/v1/__init__.py").read_bytes() == b""


def test_folder_with_files_is_refused(patched_lab: Lab) -> None:
    dest = patched_lab.root / "out"
    dest.mkdir()
    (dest / "notes.txt").write_text("mine")
    with pytest.raises(R3Error) as caught:
        write_upstream(upstream_patches(patched_lab.series()), dest)
    assert str(caught.value) == (
        f"{dest}: expected a new or empty folder, found files; choose another one"
    )


@pytest.mark.parametrize("sender", ["Zoë", "Zoë <zoe>", "<zoe@example.org>", "Z <z@e>\nX: y <a@b>"])
def test_sender_of_another_form_is_refused(patched_lab: Lab, sender: str) -> None:
    with pytest.raises(R3Error) as caught:
        upstream_patches(patched_lab.series(), sender)
    assert str(caught.value) == f"--sign-off: expected 'Name <address>', got {sender!r}"


def test_misplaced_test_is_refused(patched_lab: Lab) -> None:
    add_test(patched_lab, path="unit/test_r3.py")
    with pytest.raises(R3Error) as caught:
        upstream_patches(patched_lab.series())
    assert str(caught.value) == (
        f"{patched_lab.folder / 'tests.toml'}: expected tests/..., as in vLLM's repository, "
        "found unit/test_r3.py"
    )


def test_test_without_licence_header_is_refused(patched_lab: Lab) -> None:
    add_test(patched_lab, text="x = 1\n")
    with pytest.raises(R3Error) as caught:
        upstream_patches(patched_lab.series())
    assert str(caught.value) == (
        f"{patched_lab.root / 'tests/own_0.py'}: expected vLLM's two SPDX lines at the top"
    )


def test_missing_test_is_refused(patched_lab: Lab) -> None:
    add_test(patched_lab)
    (patched_lab.root / "tests/own_0.py").unlink()
    with pytest.raises(R3Error) as caught:
        upstream_patches(patched_lab.series())
    assert str(caught.value) == (
        f"{patched_lab.folder / 'tests.toml'}: {patched_lab.root / 'tests/own_0.py'}: "
        "No such file or directory; run in a checkout"
    )


def test_tests_of_no_patch_are_refused(patched_lab: Lab) -> None:
    add_test(patched_lab, "gone")
    with pytest.raises(R3Error) as caught:
        upstream_patches(patched_lab.series())
    assert str(caught.value) == (
        f"{patched_lab.folder / 'tests.toml'}: expected patches of the series, found gone.patch"
    )


def test_one_test_file_of_two_patches_is_refused(patched_lab: Lab) -> None:
    add_test(patched_lab)
    add_test(patched_lab, patched_lab.series().order[1].removesuffix(".patch"))
    with pytest.raises(R3Error) as caught:
        upstream_patches(patched_lab.series())
    assert str(caught.value) == (
        f"{patched_lab.folder / 'tests.toml'}: two patches bring tests/v1/test_r3.py; "
        "name them apart"
    )


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
    git = checkout(sources, tmp_path / "vllm")
    sent = upstream_patches(series)
    am(git, sent, "--keep-non-patch")
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
