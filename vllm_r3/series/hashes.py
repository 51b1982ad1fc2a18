"""`hashes.toml`: the sha256 of every patch file and of every file that the whole series touches.

Written by export, read by verify: with it a changed byte anywhere in the series is found, a byte of
a message too, without the wheel. A removed file is recorded as the empty string.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_r3.series.pin import read_toml

NAME = "hashes.toml"
HEAD = "# Written by `vllm-r3 series export`; checked by `vllm-r3 series verify`.\n"


@dataclass(frozen=True)
class Hashes:
    """sha256 in hex by patch file name and by path in the tree."""

    patches: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def sha256(data: bytes | None) -> str:
    """Return the sha256 in hex, of a file that is not there the empty string."""
    return "" if data is None else hashlib.sha256(data).hexdigest()


def render_hashes(patches: Mapping[str, bytes], files: Mapping[str, bytes | None]) -> bytes:
    """Return the text of hashes.toml, sorted by name."""
    text = HEAD
    for title, table in (("patches", patches), ("files", files)):
        text += f"\n[{title}]\n"
        text += "".join(f'"{name}" = "{sha256(table[name])}"\n' for name in sorted(table))
    return text.encode()


def read_hashes(folder: Path) -> Hashes:
    """Read hashes.toml; a folder without it has recorded nothing."""
    path = folder / NAME
    if not path.exists():
        return Hashes()
    raw = read_toml(path)
    return Hashes(dict(raw.get("patches", {})), dict(raw.get("files", {})))
