"""One patch file: its message and its exact changes, and how they apply.

"Strict" has an exact meaning here: the file that a change starts from has the recorded blob id,
every hunk stands at its recorded line, and the result has the recorded blob id. So a shifted hunk
or a changed byte cannot pass. Needs neither git nor patch: containers are patched with it.

A patch file has the form that `vllm-r3 series export` writes: `git format-patch`'s with full blob
ids and a zeroed commit id. Imports the standard library and unidiff, which reads the diff.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from typing import NamedTuple

from vllm_r3.errors import R3Error

try:
    import unidiff
except ModuleNotFoundError as error:
    raise R3Error(
        "the series tooling needs unidiff, which is not installed: pip install 'vllm-r3[series]'"
    ) from error

NO_BLOB = "0" * 40
TRAILER = re.compile(r"^([A-Z][A-Za-z-]+): (.+)$")


class Hunk(NamedTuple):
    """Lines `old` at 1-based line `start` become `new`."""

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


class FileChange(NamedTuple):
    """What a patch does to one file; a new one has no `old_blob`, a removed one no `new_blob`."""

    path: str
    old_blob: str | None
    new_blob: str | None
    hunks: tuple[Hunk, ...]


class Patch(NamedTuple):
    """A parsed patch file."""

    name: str
    subject: str
    body: str
    changes: tuple[FileChange, ...]

    @property
    def trailers(self) -> dict[str, str]:
        """The `Key: value` lines of the last paragraph of the message, unfolded."""
        last = re.sub(r"\n[ \t]+", " ", self.body.strip().split("\n\n")[-1])
        return dict(m.groups() for line in last.splitlines() if (m := TRAILER.match(line)))


def blob_id(data: bytes | None) -> str | None:
    """Return git's id of a file's content, None if there is no file."""
    return None if data is None else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def slug(subject: str) -> str:
    """Return the file name that belongs to a subject line: `[MoE] Add x` -> moe_add_x.patch."""
    return "_".join(re.findall(r"[a-z0-9]+", subject.lower())) + ".patch"


def blobs(patches: Iterable[Patch]) -> dict[str, tuple[str | None, str | None]]:
    """Return the blob ids of every touched file before the first patch and after the last."""
    out: dict[str, tuple[str | None, str | None]] = {}
    for change in (change for patch in patches for change in patch.changes):
        out[change.path] = (out.get(change.path, (change.old_blob,))[0], change.new_blob)
    return dict(sorted(out.items()))


def apply_patch(patch: Patch, files: dict[str, bytes | None]) -> None:
    """Apply one patch strictly to `files` (path -> content, absent or None: no file), in place."""
    for change in patch.changes:
        try:
            files[change.path] = _changed(change, files.get(change.path))
        except ValueError as error:
            where = f"{patch.name} does not apply, first rejected file {change.path}"
            raise R3Error(f"{where}: {error}") from error


def _changed(change: FileChange, before: bytes | None) -> bytes | None:
    _expect("", change.old_blob, blob_id(before))
    lines = split_lines(before or b"")
    out: list[bytes] = []
    at = 0
    for number, hunk in enumerate(change.hunks, 1):
        begin = hunk.start - 1 if hunk.old else hunk.start
        end = begin + len(hunk.old)
        if begin < at or tuple(lines[begin:end]) != hunk.old:
            raise ValueError(f"hunk {number} does not stand at line {hunk.start}")
        out += [*lines[at:begin], *hunk.new]
        at = end
    after = b"".join(out + lines[at:])
    result = None if change.new_blob is None and not after else after
    _expect("result ", change.new_blob, blob_id(result))
    return result


def _expect(what: str, want: str | None, found: str | None) -> None:
    if want != found:
        words = ["no such file" if blob is None else f"blob {blob[:12]}" for blob in (want, found)]
        raise ValueError(f"expected {what}{words[0]}, found {words[1]}")


def split_lines(data: bytes) -> list[bytes]:
    """Split at line feeds alone, keeping them; the last line may lack one."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def parse_patch(name: str, data: bytes) -> Patch:
    """Parse one patch file; refuse another form than `vllm-r3 series export` writes."""
    head, _, rest = data.decode("latin-1").partition("\n\n")
    at = re.search(r"^diff --git ", rest, re.MULTILINE)
    if not head.startswith(f"From {NO_BLOB} ") or at is None:
        raise _malformed(name, "a zeroed 'From' line, headers, a message and 'diff --git' lines")
    lines = re.sub(r"\n[ \t]+", " ", head).split("\n")[1:]
    fields = dict(line.partition(": ")[::2] for line in lines)
    missing = [key for key in ("From", "Date", "Subject") if key not in fields]
    if missing:
        raise _malformed(name, f"the headers From, Date and Subject (no {', '.join(missing)})")
    subject, body = (
        text.encode("latin-1").decode("utf-8", "replace").strip("\n")
        for text in (fields["Subject"], rest[: at.start()])
    )
    try:
        # latin-1 maps every byte to one character and back, so any content survives the parser
        diff = unidiff.PatchSet(rest[at.start() :])
    except unidiff.UnidiffParseError as error:
        raise R3Error(f"{name}: not a unified diff ({error}); export it again") from error
    return Patch(name, _decoded(subject), body, tuple(_change(name, f) for f in diff))


def _malformed(name: str, expected: str) -> R3Error:
    return R3Error(f"{name}: expected {expected}; write patches with 'vllm-r3 series export'")


def _decoded(header: str) -> str:
    try:
        return str(make_header(decode_header(header)))
    except (LookupError, ValueError, HeaderParseError):
        return header  # an unknown charset; SHA256SUMS tells that the file was changed


def _change(name: str, file: unidiff.PatchedFile) -> FileChange:
    info = "".join(file.patch_info or [])
    ids = re.search(r"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})", info, re.MULTILINE)
    if ids is None or file.is_rename or file.is_binary_file:
        raise _malformed(name, f"full blob ids, no rename and no binary file for {file.path}")
    if re.search(r"^(old mode|new file mode 100755|new file mode 12)", info, re.MULTILINE):
        raise _malformed(name, f"no mode but that of a plain file for {file.path}")
    if not re.fullmatch(r"vllm(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+", file.path):
        raise _malformed(name, f"a path below vllm/ in place of {file.path}")
    old, new = (None if blob == NO_BLOB else blob for blob in ids.groups())
    return FileChange(file.path, old, new, tuple(_hunk(hunk) for hunk in file))


def _hunk(hunk: unidiff.Hunk) -> Hunk:
    sides: dict[str, list[bytes]] = {"-": [], "+": []}
    last = ""
    for line in hunk:
        no_newline = line.line_type == "\\"  # speaks of the line before it
        last = last if no_newline else line.line_type
        for side in "-+" if last == " " else last:
            if no_newline:
                sides[side][-1] = sides[side][-1][:-1]
            else:
                sides[side].append(line.value.encode("latin-1"))
    return Hunk(hunk.source_start, tuple(sides["-"]), tuple(sides["+"]))
