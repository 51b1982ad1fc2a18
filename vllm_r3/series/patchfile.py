"""One patch file: its header, its message and its exact changes.

The form is what `git format-patch` writes with full blob ids. "Strict" has an exact meaning here:
the file that a change starts from has the recorded blob id, every hunk stands at its recorded line,
and the result has the recorded blob id. So a shifted hunk or a changed byte cannot pass.
May import the standard library and unidiff.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from email.errors import HeaderParseError
from email.header import decode_header, make_header

from vllm_r3.errors import R3Error

try:
    import unidiff
except ModuleNotFoundError as error:
    raise R3Error(
        "the series tooling needs unidiff, which is not installed: pip install 'vllm-r3[series]'"
    ) from error

NO_BLOB = "0" * 40
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


def parse_patch(name: str, data: bytes) -> Patch:
    """Parse one patch file.

    Raises:
        R3Error: the file is not in the form that `vllm-r3 series export` writes.
    """
    head, _, rest = data.decode("latin-1").partition("\n\n")
    at = re.search(r"^diff --git ", rest, re.MULTILINE)
    if not head.startswith(f"From {NO_BLOB} ") or at is None:
        raise _malformed(name, "a zeroed 'From' line, headers, a message and 'diff --git' lines")
    fields = _headers(head)
    missing = [key for key in ("From", "Date", "Subject") if key not in fields]
    if missing:
        raise _malformed(name, f"the headers From, Date and Subject (no {', '.join(missing)})")
    body = rest[: at.start()].encode("latin-1").decode("utf-8", "replace").strip("\n")
    changes = _changes(name, rest[at.start() :])
    return Patch(name, fields["From"], fields["Date"], fields["Subject"], body, changes)


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


def _malformed(name: str, expected: str) -> R3Error:
    return R3Error(f"{name}: expected {expected}; write patches with 'vllm-r3 series export'")


def _headers(head: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in re.sub(r"\n[ \t]+", " ", head).split("\n")[1:]:
        key, _, value = line.partition(": ")
        text = value.encode("latin-1").decode("utf-8", "replace")
        fields[key] = _decoded(text) if "=?" in text else text
    return fields


def _decoded(text: str) -> str:
    try:
        return str(make_header(decode_header(text)))
    except (LookupError, ValueError, HeaderParseError):
        return text  # an unknown charset; the hash of the file tells that it was changed


def _changes(name: str, diff: str) -> tuple[FileChange, ...]:
    # latin-1 maps every byte to one character and back, so any file content survives the parser
    try:
        files = unidiff.PatchSet(diff)
    except unidiff.UnidiffParseError as error:
        raise R3Error(f"{name}: not a unified diff ({error}); export it again") from error
    return tuple(_change(name, file) for file in files)


def _change(name: str, file: unidiff.PatchedFile) -> FileChange:
    info = "".join(file.patch_info or [])
    blobs = re.search(r"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})", info, re.MULTILINE)
    if blobs is None or file.is_rename or file.is_binary_file:
        raise _malformed(name, f"full blob ids, no rename and no binary file for {file.path}")
    if re.search(r"^(old mode|new file mode 100755|new file mode 12)", info, re.MULTILINE):
        raise _malformed(name, f"no mode but that of a plain file for {file.path}")
    old, new = (None if blob == NO_BLOB else blob for blob in blobs.groups())
    return FileChange(file.path, old, new, tuple(_hunk(hunk) for hunk in file))


def _hunk(hunk: unidiff.Hunk) -> Hunk:
    sides: dict[str, list[bytes]] = {"-": [], "+": []}
    last = ""
    for line in hunk:
        if line.line_type == "\\":  # "No newline at end of file" speaks of the line before it
            for side in "-+" if last == " " else last:
                sides[side][-1] = sides[side][-1][:-1]
            continue
        last = line.line_type
        for side in "-+" if last == " " else last:
            sides[side].append(line.value.encode("latin-1"))
    return Hunk(hunk.source_start, tuple(sides["-"]), tuple(sides["+"]))
