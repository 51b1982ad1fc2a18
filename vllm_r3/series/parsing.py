"""Read a patch file in the form that `vllm-r3 series export` writes.

That is `git format-patch`'s with full blob ids and a zeroed commit id. The diff itself is read by
unidiff. Imports the standard library and unidiff.
"""

from __future__ import annotations

import re
from email.errors import HeaderParseError
from email.header import decode_header, make_header

from vllm_r3.errors import R3Error
from vllm_r3.series.patchfile import FileChange, Hunk, Patch

try:
    import unidiff
except ModuleNotFoundError as error:
    raise R3Error(
        "the series tooling needs unidiff, which is not installed: pip install 'vllm-r3[series]'"
    ) from error

NO_BLOB = "0" * 40


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
