"""Write a series folder from a git tree: one patch a commit, the same bytes everywhere.

Nothing of git's version, of the exporter's configuration or of the tree's history gets into a
patch: the commit id is zeroed, there is no signature, no number, no diffstat. The author and the
date are the commit's, so that import and export change no byte.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series import hashes
from vllm_r3.series.folder import read_lines, reorder, touched
from vllm_r3.series.git import Git
from vllm_r3.series.importing import BASE
from vllm_r3.series.parsing import parse_patch
from vllm_r3.series.patchfile import slug

FORMAT = (
    *("--stdout", "-1", "--keep-subject", "--zero-commit", "--no-signature", "--no-stat"),
    *("--full-index", "--no-renames", "--unified=3", "--diff-algorithm=myers"),
    *("--indent-heuristic", "--src-prefix=a/", "--dst-prefix=b/", "--no-color", "--no-ext-diff"),
    *("--no-textconv", "--no-relative", "--no-notes", "--no-thread", "--no-attach", "--binary"),
    *("--no-add-header", "--no-to", "--no-cc"),
)


@dataclass(frozen=True)
class Export:
    """What an export would write: the folder's files by name, those to remove, and the changes."""

    files: dict[str, bytes]
    removed: list[str]
    changed: list[str]


def plan_export(tree: Path, folder: Path, base: str = BASE) -> Export:
    """Work out the export of `tree` to `folder` without writing.

    Raises:
        R3Error: the tree has uncommitted changes, merges, leftover fixups, two patches of one name
            or a commit that is no patch.
    """
    git = Git(tree)
    git.assert_root()
    commits = _commits(git, base)
    patches: dict[str, bytes] = {}
    for commit in commits:
        subject = git.text("log", "-1", "--format=%s", commit)
        name = _file_name(subject, patches)
        patches[name] = git.run("format-patch", *FORMAT, commit)
    parsed = [parse_patch(name, data) for name, data in patches.items()]
    contents = {path: _content(git, path) for path in touched(parsed)}
    lines = reorder(read_lines(folder) if (folder / "series").exists() else (), list(patches))
    files = {
        **patches,
        "series": "".join(f"{line}\n" for line in lines).encode(),
        hashes.NAME: hashes.render_hashes(patches, contents),
    }
    removed = sorted(p.name for p in folder.glob("*.patch") if p.name not in patches)
    changed = [n for n, data in files.items() if _bytes(folder / n) != data]
    return Export(files, removed, changed)


def write_export(export: Export, folder: Path) -> None:
    """Write what plan_export worked out: each file whole or not at all, removals last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in export.changed:
        temp = folder / f".{name}.tmp"
        temp.write_bytes(export.files[name])
        os.replace(temp, folder / name)
    for name in export.removed:
        (folder / name).unlink()


def _commits(git: Git, base: str) -> list[str]:
    if not git.succeeds("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"):
        raise R3Error(f"{git.root}: expected the tag {base} on the base commit, found none")
    if not git.succeeds("merge-base", "--is-ancestor", base, "HEAD"):
        raise R3Error(f"{git.root}: expected {base} among the ancestors of HEAD; rebase onto it")
    dirty = git.text("status", "--porcelain", "--untracked-files=all").splitlines()
    if dirty:
        raise R3Error(
            f"{git.root}: expected every change committed, found {len(dirty)} that are not: "
            + ", ".join(line.split(maxsplit=1)[-1] for line in dirty[:5])
        )
    merges = git.text("rev-list", "--merges", f"{base}..HEAD").split()
    if merges:
        raise R3Error(f"{git.root}: expected one line of commits, found the merge {merges[0][:12]}")
    return git.text("rev-list", "--reverse", f"{base}..HEAD").split()


def _file_name(subject: str, taken: dict[str, bytes]) -> str:
    name = slug(subject)
    if subject.startswith(("fixup!", "squash!", "amend!")):
        raise R3Error(f"commit '{subject}' is a fixup: run 'git rebase --autosquash' first")
    if name in taken or name == ".patch":
        raise R3Error(f"commit '{subject}': expected a subject of its own, {name} is taken")
    return name


def _content(git: Git, path: str) -> bytes | None:
    if not git.text("ls-tree", "HEAD", "--", path):
        return None
    return git.run("cat-file", "blob", f"HEAD:{path}")


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
