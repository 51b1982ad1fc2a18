"""Make a git tree from the pinned wheel and the series: one commit a patch, the base tagged.

Two independent ways lead to every commit: the strict reader in `patchfile` and `git am`. Their
trees must agree, because `git am` alone takes shifted hunks in silence.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import Series, apply_patch
from vllm_r3.series.git import Git
from vllm_r3.series.patchfile import Patch, blob_id

BASE = "r3-base"
ONTO = "r3-onto"
WHEN = {"GIT_AUTHOR_DATE": "2026-05-15T00:00:00Z", "GIT_COMMITTER_DATE": "2026-05-15T00:00:00Z"}


def import_series(
    series: Series,
    sources: Mapping[str, bytes],
    dest: Path,
    onto: Mapping[str, bytes] | None = None,
) -> int:
    """Write the tree to `dest`, which must be new or empty, and return the number of commits.

    `sources` are the wheel's Python files by path. `onto`, those of another vLLM, are committed
    beside the series and tagged r3-onto. Nothing is left at `dest` after a failure.

    Raises:
        R3Error: `dest` is in use, or a patch does not apply exactly.
    """
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise R3Error(f"{dest}: expected a new or empty folder, found files; choose another one")
    dest.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        _fill(series, sources, temp)
        if onto is not None:
            _commit_onto(Git(temp), onto)
        if dest.exists():
            dest.rmdir()
        os.replace(temp, dest)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    os.chmod(dest, 0o755)
    return len(series.order)


def _commit_onto(git: Git, sources: Mapping[str, bytes]) -> None:
    git.run("checkout", "-q", "-b", "onto", BASE)
    git.run("rm", "-q", "-r", "--cached", ".")
    shutil.rmtree(git.root / "vllm")
    commit_base(git, sources, "Another vLLM, Python files of its wheel")
    git.run("tag", ONTO)
    git.run("checkout", "-q", "main")


def commit_base(git: Git, sources: Mapping[str, bytes], message: str) -> None:
    """Write `sources` into a fresh tree and commit them with a fixed date."""
    for path, data in sources.items():
        file = git.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    git.run("add", "--all", "--force", ".")
    author = {"GIT_AUTHOR_NAME": "vllm-r3", "GIT_AUTHOR_EMAIL": "vllm-r3@localhost"}
    git.run("commit", "-q", "--message", message, env={**author, **WHEN})


def commit_patch(git: Git, name: str, data: bytes) -> None:
    """Make one commit of a patch file, with its author, date and whole subject."""
    git.run(
        *("am", "-q", "--keep-non-patch", "--keep-cr", "--no-3way", "--no-scissors"),
        *("--committer-date-is-author-date", "--whitespace=nowarn"),
        data=data,
    )


def _fill(series: Series, sources: Mapping[str, bytes], root: Path) -> None:
    git = Git(root)
    git.init()
    (root / ".git" / "info" / "exclude").write_text("__pycache__/\n*.pyc\n*.so\n")
    commit_base(git, sources, f"vLLM {series.pin.vllm}, Python files of the pinned wheel")
    git.run("tag", BASE)
    files: dict[str, bytes | None] = dict(sources)
    patches = series.patches()
    for number, patch in enumerate(patches, 1):
        try:
            apply_patch(patch, files)
        except R3Error as error:
            raise R3Error(
                f"patch {number} of {len(patches)}: {error}; see 'Resolve a conflict' in README.md"
            ) from error
        commit_patch(git, patch.name, series.raw[patch.name])
        _assert_same(git, patch, files)


def _assert_same(git: Git, patch: Patch, files: Mapping[str, bytes | None]) -> None:
    for change in patch.changes:
        listed = git.text("ls-tree", "HEAD", "--", change.path).split()
        found = listed[2] if listed else None
        data = files[change.path]
        if found != (None if data is None else blob_id(data)):
            raise R3Error(
                f"{patch.name}: git made blob {found} of {change.path}, the patch says "
                f"{change.new_blob}; export the series again"
            )
