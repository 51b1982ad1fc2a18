"""Find where a patch's hunks stand in another version of a file.

Exact lines only, as `git apply` takes them: a hunk may have moved, its lines may not have changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_r3.series.patchfile import FileChange, Hunk, split_lines


@dataclass(frozen=True)
class Placed:
    """How one change fits: the new content, or the first hunk (from 1) that has no place."""

    data: bytes | None
    offsets: tuple[int, ...] = ()
    failed_hunk: int = 0
    why: str = ""


def place_change(change: FileChange, before: bytes | None) -> Placed:
    """Lay a change over a file of another version; nearest exact place first."""
    if change.old_blob is None and before is not None:
        return Placed(before, failed_hunk=1, why="the new file is there already")
    if change.old_blob is not None and before is None:
        return Placed(None, failed_hunk=1, why="the file is gone")
    lines = split_lines(before or b"")
    out: list[bytes] = []
    offsets: list[int] = []
    at = shift = 0
    for number, hunk in enumerate(change.hunks, 1):
        begin = _find(lines, hunk, at, shift)
        if begin is None:
            why = f"the lines of hunk {number} (line {hunk.start}) are not there"
            return Placed(before, tuple(offsets), number, why)
        shift = begin - _recorded(hunk)
        offsets.append(shift)
        out += [*lines[at:begin], *hunk.new]
        at = begin + len(hunk.old)
    data = b"".join(out + lines[at:])
    if change.new_blob is None:
        left = Placed(before, tuple(offsets), 1, "the file to remove has other lines")
        return left if data else Placed(None, tuple(offsets))
    return Placed(data, tuple(offsets))


def _recorded(hunk: Hunk) -> int:
    return hunk.start - 1 if hunk.old else hunk.start


def _find(lines: list[bytes], hunk: Hunk, at: int, shift: int) -> int | None:
    want = _recorded(hunk) + shift
    last = len(lines) - len(hunk.old)
    places = sorted(range(at, last + 1), key=lambda begin: (abs(begin - want), begin))
    size = len(hunk.old)
    return next((b for b in places if tuple(lines[b : b + size]) == hunk.old), None)
