"""The series as a git tree, one commit a patch, and back: import and export.

Import compares each commit's blob ids with those that its patch records, because `git am` alone
takes shifted hunks in silence. Nothing of git's version, of the exporter's configuration or of the
tree's history gets into an exported patch, so import and export change no byte.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import SUMS, Series, read_lines, render_sums, reorder
from vllm_r3.series.git import Git
from vllm_r3.series.patch import NO_BLOB, Patch, parse_patch, slug

BASE = "r3-base"
ONTO = "r3-onto"
WHEN = {"GIT_AUTHOR_DATE": "2026-05-15T00:00:00Z", "GIT_COMMITTER_DATE": "2026-05-15T00:00:00Z"}
AM = (
    *("am", "-q", "--keep-cr", "--whitespace=nowarn", "--no-scissors"),
    "--keep-non-patch",  # else git strips [MoE] from the subject
    "--committer-date-is-author-date",  # two imports make the same commits
)
FORMAT = (
    *("format-patch", "--numbered-files", "--no-stat", "--no-signature", "--no-renames"),
    "--always",  # a commit without a change is refused, not left out
    "--keep-subject",  # no [PATCH]
    "--zero-commit",  # commit ids change with every edit of an earlier patch
    "--full-index",  # whole blob ids: what "strict" compares
)


def import_series(
    series: Series,
    sources: Mapping[str, bytes],
    dest: Path,
    onto: Mapping[str, bytes] | None = None,
) -> Git:
    """Write the tree to `dest`, which must be new or empty.

    `sources` are the wheel's Python files by path. `onto`, those of another vLLM, are committed
    beside the series and tagged r3-onto. Nothing is left at `dest` after a failure.

    Raises:
        R3Error: `dest` is in use, or a patch does not apply exactly.
    """
    with new_tree(dest) as git:
        commit_base(git, sources, f"vLLM {series.pin.vllm}, Python files of the pinned wheel")
        git.run("tag", BASE)
        _commit_patches(git, series)
        if onto is not None:
            git.run("checkout", "-q", "-b", "onto", BASE)
            git.run("rm", "-q", "-r", ".")
            commit_base(git, onto, "Another vLLM, Python files of its wheel")
            git.run("tag", ONTO)
            git.run("checkout", "-q", "main")
    return Git(dest)


def require_empty(dest: Path) -> None:
    """Refuse a folder that holds something, or a path that is no folder."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise R3Error(f"{dest}: expected a new or empty folder, found files; choose another one")


@contextlib.contextmanager
def new_tree(dest: Path) -> Iterator[Git]:
    """Make a git tree beside `dest`, new or empty, and move it there if all goes well."""
    require_empty(dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        git = Git(temp)
        git.run("init", "-q", "--initial-branch=main", ".")
        git.run("config", "core.autocrlf", "false")
        (temp / ".git" / "info" / "exclude").write_text("__pycache__/\n*.pyc\n*.so\n")
        yield git
        os.chmod(temp, 0o755)
        os.replace(temp, dest)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def commit_base(git: Git, sources: Mapping[str, bytes], message: str) -> None:
    """Commit `sources` as the only files of a tree, with a fixed date."""
    for path, data in sources.items():
        file = git.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    git.run("add", "--all", "--force", ".")
    git.run("commit", "-q", "--message", message, env=WHEN)


def _commit_patches(git: Git, series: Series) -> None:
    patches = series.patches()
    if not patches:
        return
    try:
        git.run(*AM, *((series.folder / patch.name).resolve() for patch in patches))
    except R3Error as error:
        number = int(git.text("rev-list", "--count", f"{BASE}..HEAD")) + 1
        raise _rejected(patches, number, str(error)) from error
    made = _blobs_of_commits(git)
    for number, patch in enumerate(patches, 1):
        want = {c.path: (c.old_blob, c.new_blob) for c in patch.changes}
        if made[number - 1] != want:
            paths = sorted(path for path, _ in made[number - 1].items() ^ want.items())
            what = f"git made other blobs than it records of {', '.join(dict.fromkeys(paths))}"
            raise _rejected(patches, number, what)


def _rejected(patches: list[Patch], number: int, what: str) -> R3Error:
    return R3Error(
        f"patch {number} of {len(patches)}: {patches[number - 1].name} does not apply: {what}; "
        "see 'Resolve a conflict' in patches/README.md"
    )


def _blobs_of_commits(git: Git) -> list[dict[str, tuple[str | None, str | None]]]:
    """Return path -> blob ids before and after, of each commit above the base."""
    options = ("--reverse", "--format=%H", "--raw", "--no-abbrev", "--no-renames")
    out: list[dict[str, tuple[str | None, str | None]]] = []
    for line in git.text("log", *options, f"{BASE}..HEAD").splitlines():
        if line.startswith(":"):
            meta, path = line.split("\t")
            old, new = (None if blob == NO_BLOB else blob for blob in meta.split()[2:4])
            out[-1][path] = (old, new)
        elif line:
            out.append({})
    return out


def export_series(
    tree: Path, folder: Path, base: str = BASE, write: bool = True
) -> tuple[list[str], list[str]]:
    """Write the series of `tree` to `folder`: each file whole or not at all, removals last.

    Returns:
        The names of the files that changed and of those that were removed, or would be.

    Raises:
        R3Error: the tree has uncommitted changes, merges, leftover fixups, two patches of one name
            or a commit that is no patch; nothing was written.
    """
    git = Git(tree)
    _check_tree(git, base)
    patches: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as temp:
        git.run(*FORMAT, "--output-directory", temp, f"{base}..HEAD")
        for file in sorted(Path(temp).iterdir(), key=lambda file: int(file.name)):
            data = file.read_bytes()
            subject = parse_patch(f"commit {file.name}", data).subject
            patches[_file_name(subject, patches)] = data
    lines = reorder(read_lines(folder) if (folder / "series").exists() else (), patches)
    text = "".join(f"{line}\n" for line in lines)
    files = {**patches, "series": text.encode(), SUMS: render_sums(patches)}
    had = {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}
    changed = [name for name, data in files.items() if had.get(name) != data]
    removed = sorted(name for name in had if name.endswith(".patch") and name not in patches)
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        for name in changed:
            temp_file = folder / f".{name}.tmp"
            temp_file.write_bytes(files[name])
            os.replace(temp_file, folder / name)
        for name in removed:
            (folder / name).unlink()
    return changed, removed


def _check_tree(git: Git, base: str) -> None:
    if not (git.root / ".git").exists():  # else git would look further up
        raise R3Error(
            f"{git.root}: expected the root of a git tree made by 'vllm-r3 series import', "
            "found no .git there"
        )
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


def _file_name(subject: str, taken: Mapping[str, bytes]) -> str:
    name = slug(subject)
    if subject.startswith(("fixup!", "squash!", "amend!")):
        raise R3Error(f"commit '{subject}' is a fixup: run 'git rebase --autosquash' first")
    if name in taken or name == ".patch":
        raise R3Error(f"commit '{subject}': expected a subject of its own, {name} is taken")
    return name
