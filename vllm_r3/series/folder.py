"""A series folder such as patches/v0.21.0: the order, the patches and their hash.

`series` holds one file name a line; lines that start with `#` are headings and stay where they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series.parsing import parse_patch
from vllm_r3.series.patchfile import Patch, apply_change
from vllm_r3.series.pin import Pin, read_pin

DEFAULT = "v0.21.0"


@dataclass(frozen=True)
class Series:
    """A folder that was read: its pin, the lines of `series`, the bytes of each listed patch."""

    folder: Path
    pin: Pin
    lines: tuple[str, ...]
    raw: dict[str, bytes]

    @property
    def order(self) -> list[str]:
        """The patch file names, first applied first."""
        return [line for line in self.lines if is_patch(line)]

    @property
    def hash(self) -> str:
        """sha256 over names and bytes of the patches in their order."""
        digest = hashlib.sha256()
        for name in self.order:
            digest.update(f"{name}\0{len(self.raw[name])}\0".encode() + self.raw[name])
        return digest.hexdigest()

    def patches(self) -> list[Patch]:
        """Parse every patch, in order."""
        return [parse_patch(name, self.raw[name]) for name in self.order]


def default_folder() -> Path:
    """Return the folder of this checkout, else the one that an installed vllm_r3 carries."""
    package = Path(__file__).resolve().parent.parent
    places = [package.parent / "patches" / DEFAULT, package / "patches" / DEFAULT]
    return next((place for place in places if (place / "pin.toml").exists()), places[0])


def read_series(folder: Path | None = None) -> Series:
    """Read a series folder.

    Raises:
        R3Error: there is none, or a listed patch is missing.
    """
    folder = folder or default_folder()
    pin = read_pin(folder)
    lines = read_lines(folder)
    names = [line for line in lines if is_patch(line)]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise R3Error(f"{folder / 'series'} lists files that are not there: {', '.join(missing)}")
    return Series(folder, pin, lines, {name: (folder / name).read_bytes() for name in names})


def read_lines(folder: Path) -> tuple[str, ...]:
    """Return the lines of `series`, stripped."""
    path = folder / "series"
    try:
        return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError as error:
        raise R3Error(f"{path}: expected the list of patches, found no file") from error


def reorder(lines: Iterable[str], order: list[str]) -> tuple[str, ...]:
    """Return the lines of `series` for a new order, each patch below the heading it had.

    A new patch goes below the heading of the patch before it; a heading without patches is dropped.
    """
    heading: list[str] = []
    headings: dict[str, tuple[str, ...]] = {}
    fresh = True
    for line in lines:
        if is_patch(line):
            headings[line] = tuple(heading)
            fresh = True
        else:
            heading = [line] if fresh else [*heading, line]
            fresh = False
    out: list[str] = []
    current: tuple[str, ...] = next(iter(headings.values()), tuple(heading))
    shown: tuple[str, ...] | None = None
    for name in order:
        current = headings.get(name, current)
        if current != shown:
            out += current
            shown = current
        out.append(name)
    return tuple(out)


def touched(patches: Iterable[Patch]) -> list[str]:
    """Return every path that any of the patches touches, sorted."""
    return sorted({change.path for patch in patches for change in patch.changes})


def apply_patch(patch: Patch, files: dict[str, bytes | None]) -> None:
    """Apply one patch strictly to `files` (path -> content, absent or None: no file), in place."""
    if not patch.changes:
        raise R3Error(f"{patch.name} changes no file; remove it from the series or export it again")
    for change in patch.changes:
        files[change.path] = apply_change(change, files.get(change.path), patch.name)


def is_patch(line: str) -> bool:
    """Tell a file name of `series` from a heading or an empty line."""
    return bool(line) and not line.startswith("#")
