"""The series towards other versions of vLLM: patches to send, and how it fits a newer one.

What is sent has [PATCH n/N], the message without this project's trailers, a sign-off, the change to
vllm/, and the patch's own tests below vLLM's tests/. `tests.toml` of the series folder says which
those are: for each patch a list of paths below tests/upstream, where they run with all others. What
only this project needs to know (why, how verified here) goes below the `---` as a note.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import Series, read_toml
from vllm_r3.series.git import Git
from vllm_r3.series.patch import Patch
from vllm_r3.series.tree import AM, BASE, ONTO, commit_base, new_tree, require_empty

INDEX = "tests.toml"
SENDER = "Your Name <your.email@example.com>"
SPDX = b"# SPDX-License-Identifier: Apache-2.0\n# SPDX-FileCopyrightText: Copyright contributors"


def export_upstream(
    series: Series, sources: Mapping[str, bytes], dest: Path, sender: str = SENDER
) -> dict[str, int]:
    """Write every patch into `dest`, new or empty; return the number of its tests by file name.

    Args:
        sources: the Python files of the pinned wheel by path.
        sender: `Name <address>`, author and sign-off of every patch.

    Raises:
        R3Error: the sender has another form, or tests.toml does not fit.
    """
    if not re.fullmatch(r"[^<>\n]+ <[^<>\s]+@[^<>\s]+>", sender):
        raise R3Error(f"--sign-off: expected 'Name <address>', got {sender!r}")
    require_empty(dest)
    tests = read_tests(series)
    with tempfile.TemporaryDirectory() as temp, new_tree(Path(temp) / "tree") as git:
        commit_base(git, sources, f"vLLM {series.pin.vllm}")
        git.run("tag", BASE)
        for patch in series.patches():
            git.run(*AM, data=series.raw[patch.name])
            _amend(git, patch, tests.get(patch.name, {}), sender)
        written = git.text(
            *("format-patch", "--notes", "--numbered", "--no-signature", "--zero-commit"),
            *("--no-stat", "--full-index", "--no-renames", "--output-directory", dest.resolve()),
            BASE,
        )
    names = [Path(line).name for line in written.splitlines()]
    return {n: len(tests.get(p, {})) for n, p in zip(names, series.order, strict=True)}


def read_tests(series: Series) -> dict[str, dict[str, bytes]]:
    """Return the tests of each patch that has some, by their path in vLLM's repository.

    Raises:
        R3Error: tests.toml names no patch, or a file that is not there or does not begin with
            vLLM's licence header.
    """
    where = series.folder / INDEX
    listed = read_toml(where) if where.exists() else {}
    stray = sorted({f"{topic}.patch" for topic in listed} - set(series.order))
    if stray:
        raise R3Error(f"{where}: expected patches of the series, found {', '.join(stray)}")
    root = series.folder.parents[1] / "tests" / "upstream"
    return {
        f"{topic}.patch": {f"tests/{path}": _read_test(where, root / path) for path in paths}
        for topic, paths in listed.items()
    }


def try_rebase(git: Git, series: Series) -> list[tuple[str, str, list[str]]]:
    """Try the patches in order on the tag r3-onto of an imported tree.

    Returns:
        For each patch its name, "clean" (lines may have moved), "merged" (by a three-way merge) or
        "conflict", and the files in conflict. A patch in conflict is left out; the three-way merge
        keeps later ones from conflicting too, unless they touch the same lines.
    """
    verdicts = []
    git.run("checkout", "-q", "--detach", ONTO)
    for name in series.order:
        kind, files = "clean", []
        if not git.succeeds(*AM, data=series.raw[name]):
            git.run("am", "--abort")
            kind = "merged"
            if not git.succeeds(*AM, "--3way", data=series.raw[name]):
                kind = "conflict"
                files = git.text("diff", "--name-only", "--diff-filter=U").split()
                git.run("am", "--skip")
        verdicts.append((name, kind, files))
    git.run("checkout", "-q", "main")
    return verdicts


def _read_test(where: Path, file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise R3Error(f"{where}: {file}: {error.strerror}; run in a checkout") from error
    if data and file.suffix == ".py" and not data.startswith(SPDX):
        raise R3Error(f"{file}: expected vLLM's two SPDX lines at the top")
    return data


def _amend(git: Git, patch: Patch, tests: Mapping[str, bytes], sender: str) -> None:
    """Give the last commit the patch's tests, the message to send and the sender; note the rest."""
    for path, data in tests.items():
        (git.root / path).parent.mkdir(parents=True, exist_ok=True)
        (git.root / path).write_bytes(data)
    git.run("add", "--all", ".")
    message, _, trailers = patch.body.strip().rpartition("\n\n")
    # as vLLM's own messages write them: #1, #2
    numbers = re.findall(r"vllm-project/vllm(#\d+)", patch.trailers.get("Upstream", ""))
    ends = [f"Related: {', '.join(dict.fromkeys(numbers))}"] if numbers else []
    ends += [f"Signed-off-by: {sender}"]
    text = "\n".join([patch.subject, "", message, "", *ends])
    git.run("commit", "-q", "--amend", "--author", sender, "--file=-", data=text.encode())
    git.run("notes", "add", "--file=-", data=trailers.encode())
