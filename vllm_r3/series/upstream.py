"""Write the series as patches to send upstream: `git am` takes them on a vLLM checkout at the tag.

    0001-<topic>.patch   [PATCH 1/N], the message without this project's trailers, a sign-off, the
                         change to vllm/, and the topic's own tests as new files in vLLM's tests/

Which tests those are says `tests.toml` of the series folder: for each topic, paths in vLLM's
repository and the files of this checkout that go there. So a test has one home, where it runs with
all others. What only this project needs to know (why, how verified here) goes below the `---`,
which git leaves out of the commit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import Series
from vllm_r3.series.patchfile import Patch, blob_id, split_lines
from vllm_r3.series.pin import read_toml

INDEX = "tests.toml"
SENDER = "Your Name <your.email@example.com>"
NO_BLOB = "0" * 40
HEAD = f"From {NO_BLOB} Mon Sep 17 00:00:00 2001\n"
SPDX = b"# SPDX-License-Identifier: Apache-2.0\n# SPDX-FileCopyrightText: Copyright contributors"


@dataclass(frozen=True)
class Sent:
    """One patch to send: its file name, its bytes, and the paths of the tests it brings."""

    name: str
    data: bytes
    tests: tuple[str, ...]


def upstream_patches(series: Series, sender: str = SENDER) -> list[Sent]:
    """Turn every patch of a series into one to send, in order.

    Args:
        sender: `Name <address>`, author and sign-off of every patch.

    Raises:
        R3Error: the sender has another form, or tests.toml does not fit.
    """
    if not re.fullmatch(r"[^<>\n]+ <[^<>\s]+@[^<>\s]+>", sender):
        raise R3Error(f"--sign-off: expected 'Name <address>', got {sender!r}")
    patches = series.patches()
    tests = read_tests(series)
    return [
        _sent(
            patch, series.raw[patch.name], tests.get(patch.name, {}), number, len(patches), sender
        )
        for number, patch in enumerate(patches, 1)
    ]


def write_upstream(sent: list[Sent], dest: Path) -> None:
    """Write the patches into `dest`, which must be new or empty."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise R3Error(f"{dest}: expected a new or empty folder, found files; choose another one")
    dest.mkdir(parents=True, exist_ok=True)
    for patch in sent:
        (dest / patch.name).write_bytes(patch.data)


def read_tests(series: Series) -> dict[str, dict[str, bytes]]:
    """Return the tests of each patch that has some, by their path in vLLM's repository, sorted.

    Raises:
        R3Error: tests.toml names no patch, a file that is not there, or a place outside of tests/;
            two patches bring one file; a file does not begin with vLLM's licence header.
    """
    where = series.folder / INDEX
    listed = read_toml(where) if where.exists() else {}
    stray = sorted({f"{topic}.patch" for topic in listed} - set(series.order))
    if stray:
        raise R3Error(f"{where}: expected patches of the series, found {', '.join(stray)}")
    paths = [path for files in listed.values() for path in files]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise R3Error(f"{where}: two patches bring {', '.join(twice)}; name them apart")
    root = series.folder.parents[1]
    return {
        f"{topic}.patch": {
            path: _read_test(root, where, path, files[path]) for path in sorted(files)
        }
        for topic, files in listed.items()
    }


def _read_test(root: Path, where: Path, path: str, source: str) -> bytes:
    if not path.startswith("tests/"):
        raise R3Error(f"{where}: expected tests/..., as in vLLM's repository, found {path}")
    try:
        data = (root / source).read_bytes()
    except OSError as error:
        raise R3Error(f"{where}: {root / source}: {error.strerror}; run in a checkout") from error
    if data and path.endswith(".py") and not data.startswith(SPDX):
        raise R3Error(f"{root / source}: expected vLLM's two SPDX lines at the top")
    return data


def _sent(
    patch: Patch, raw: bytes, tests: dict[str, bytes], number: int, of: int, sender: str
) -> Sent:
    message, notes = _split(patch.body)
    related = _related(notes.get("Upstream", "none"))
    text = (
        f"{HEAD}From: {sender}\nDate: {patch.date}\n"
        f"Subject: [PATCH {number}/{of}] {patch.subject}\n\n{message}\n\n"
        + (f"Related: {related}\n" if related else "")
        + f"Signed-off-by: {sender}\n---\n"
        + "".join(f"{key}: {value}\n" for key, value in notes.items())
        + "\n"
    )
    at = re.search(rb"^diff --git ", raw, re.MULTILINE)
    assert at is not None, patch.name  # parse_patch has found it
    diff = raw[at.start() :].rstrip(b"\n") + b"\n"
    added = b"".join(_new_file(path, data) for path, data in tests.items())
    name = f"{number:04d}-{patch.name.removesuffix('.patch').replace('_', '-')[:60]}.patch"
    return Sent(name, _header(text) + diff + added, tuple(tests))


def _header(text: str) -> bytes:
    """Name the encoding, so that a mail reader and git read the same letters."""
    if text.isascii():
        return text.encode()
    head, _, rest = text.partition("\n\n")
    mime = "MIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\n"
    return f"{head}\n{mime}Content-Transfer-Encoding: 8bit\n\n{rest}".encode()


def _split(body: str) -> tuple[str, dict[str, str]]:
    """Return the message without its last paragraph, and that paragraph's trailers, unfolded."""
    *paragraphs, last = body.strip().split("\n\n")
    unfolded = re.sub(r"\n[ \t]+", " ", last)
    pairs = [line.partition(": ") for line in unfolded.splitlines()]
    return "\n\n".join(paragraphs), {key: value for key, _, value in pairs}


def _related(upstream: str) -> str:
    """Return the upstream numbers as vLLM's own messages write them: `#1, #2`."""
    return ", ".join(dict.fromkeys(re.findall(r"vllm-project/vllm(#\d+)", upstream)))


def _new_file(path: str, data: bytes) -> bytes:
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\nindex {NO_BLOB}..{blob_id(data)}\n"
    lines = split_lines(data)
    if not lines:
        return head.encode()
    last = b"" if data.endswith(b"\n") else b"\n\\ No newline at end of file\n"
    count = "1" if len(lines) == 1 else f"1,{len(lines)}"
    head += f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +{count} @@\n"
    return head.encode() + b"".join(b"+" + line for line in lines) + last
