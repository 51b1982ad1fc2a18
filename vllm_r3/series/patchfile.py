"""One patch file: its message and its exact changes, and how they apply.

"Strict" has an exact meaning here: the file that a change starts from has the recorded blob id,
every hunk stands at its recorded line, and the result has the recorded blob id. So a shifted hunk
or a changed byte cannot pass. Imports the standard library alone; `parsing` makes a Patch.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from vllm_r3.errors import R3Error

TRAILER = re.compile(r"^([A-Z][A-Za-z-]+): (.+)$")


@dataclass(frozen=True)
class Hunk:
    """Lines `old` at 1-based line `start` become `new`."""

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file; a new one has no `old_blob`, a removed one no `new_blob`."""

    path: str
    old_blob: str | None
    new_blob: str | None
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """A parsed patch file."""

    name: str
    author: str
    date: str
    subject: str
    body: str
    changes: tuple[FileChange, ...]

    @property
    def trailers(self) -> dict[str, str]:
        """The `Key: value` lines of the last paragraph of the message."""
        last = self.body.strip().split("\n\n")[-1]
        return dict(m.groups() for line in last.splitlines() if (m := TRAILER.match(line)))


def blob_id(data: bytes) -> str:
    """Return git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def slug(subject: str) -> str:
    """Return the file name that belongs to a subject line: `[MoE] Add x` -> moe_add_x.patch."""
    return "_".join(re.findall(r"[a-z0-9]+", subject.lower())) + ".patch"


def apply_change(change: FileChange, before: bytes | None, patch: str) -> bytes | None:
    """Return the content of a file after a change (None: the file is removed).

    Raises:
        R3Error: the content before or after is not the recorded one, or a hunk is elsewhere.
    """
    found = None if before is None else blob_id(before)
    if found != change.old_blob:
        raise _rejected(patch, change.path, f"expected {_said(change.old_blob)}, {_said(found)}")
    after = _splice(change, split_lines(before or b""), patch)
    if change.new_blob is None:
        if after:
            raise _rejected(patch, change.path, "expected to remove every line, some are left")
        return None
    if blob_id(after) != change.new_blob:
        raise _rejected(
            patch, change.path, f"expected result {_said(change.new_blob)}, {_said(blob_id(after))}"
        )
    return after


def split_lines(data: bytes) -> list[bytes]:
    """Split at line feeds alone, keeping them; the last line may lack one."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def _splice(change: FileChange, lines: list[bytes], patch: str) -> bytes:
    out: list[bytes] = []
    at = 0
    for number, hunk in enumerate(change.hunks, 1):
        begin = hunk.start - 1 if hunk.old else hunk.start
        end = begin + len(hunk.old)
        if begin < at or tuple(lines[begin:end]) != hunk.old:
            what = f"hunk {number} does not stand at line {hunk.start}"
            raise _rejected(patch, change.path, what)
        out += lines[at:begin]
        out += hunk.new
        at = end
    return b"".join(out + lines[at:])


def _rejected(patch: str, path: str, what: str) -> R3Error:
    return R3Error(f"{patch} does not apply, first rejected file {path}: {what}")


def _said(blob: str | None) -> str:
    return "no such file" if blob is None else f"blob {blob[:12]}"
