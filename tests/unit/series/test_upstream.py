"""The series as patches to send: `git am` takes them and makes the same files."""

from __future__ import annotations

import pytest
from sample_series import FIRST, SECOND, SOURCES, SPDX, Lab, am

from vllm_r3.cli import main
from vllm_r3.errors import R3Error
from vllm_r3.series.git import Git
from vllm_r3.series.installed import apply_series
from vllm_r3.series.tree import import_series
from vllm_r3.series.upstream import SENDER, export_upstream, read_tests, try_rebase

TOPIC = FIRST.removesuffix(".patch")
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


def verdicts(lab: Lab, other: dict[str, bytes | None]) -> dict[str, list[str]]:
    sources = {path: data for path, data in {**SOURCES, **other}.items() if data is not None}
    git = import_series(lab.series(), SOURCES, lab.root / "both", sources)
    return {name: [kind, *files] for name, kind, files in try_rebase(git, lab.series())}


@pytest.mark.parametrize(
    ("path", "before", "after", "first", "second"),
    [
        ("vllm/_version.py", b"generated", b"made", ["clean"], ["clean"]),
        ("vllm/engine.py", b"line_01", b"# one\n# two\nline_01", ["clean"], ["clean"]),
        ("vllm/engine.py", b"line_12 = 12", b"line_12 = 0", ["merged"], ["clean"]),
        (
            "vllm/engine.py",
            b"line_30 = 30",
            b"line_30 = 0",
            ["clean"],
            ["conflict", "vllm/engine.py"],
        ),
        ("vllm/old/gone.py", b"True", b"False", ["clean"], ["conflict", "vllm/old/gone.py"]),
    ],
    ids=["elsewhere", "moved", "context", "changed-line", "file-to-remove"],
)
def test_patch_on_another_base_is_clean_merged_or_in_conflict(
    patched_lab: Lab, path: str, before: bytes, after: bytes, first: list[str], second: list[str]
) -> None:
    other = {path: SOURCES[path].replace(before, after, 1)}
    assert other != {path: SOURCES[path]}
    assert verdicts(patched_lab, other) == {FIRST: first, SECOND: second}


def test_patch_on_top_of_a_conflicting_one_is_judged_by_itself(patched_lab: Lab) -> None:
    found = verdicts(patched_lab, {"vllm/r3/store.py": b"theirs = 1\n"})
    assert found == {FIRST: ["conflict", "vllm/r3/store.py"], SECOND: ["clean"]}


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
