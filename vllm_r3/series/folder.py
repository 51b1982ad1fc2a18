"""A series folder such as patches/v0.21.0: pin.toml, the order, the patches and their checksums.

    pin.toml     which vLLM the series is made for: both wheels by name and sha256
    series       the order, one file name a line; lines that start with `#` are headings
    SHA256SUMS   of the patches in their order, as sha256sum writes it; its own sha256 names the
                 series. The patches themselves hold the blob ids of every file before and after.

Imports `patch` and the standard library, and tomli on Python 3.10.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_r3.errors import R3Error
from vllm_r3.series.patch import Patch, parse_patch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT = "0.21.0"
SUMS = "SHA256SUMS"
TARGETS = ("cpu", "cuda")


class PinnedWheel(NamedTuple):
    """One wheel of the index: distribution and version, file name, full sha256, dependency lock."""

    distribution: str
    version: str
    file: str
    sha256: str
    lock: str


class Pin(NamedTuple):
    """The content of pin.toml."""

    vllm: str
    commit: str
    revision: int
    target_specific: tuple[str, ...]
    wheels: dict[str, PinnedWheel]

    def __str__(self) -> str:
        return f"{self.vllm}@{self.commit}"

    @property
    def version(self) -> str:
        """The public version of the base: `0.21.0`."""
        return self.vllm.removeprefix("v")

    def patched_version(self, target: str) -> str:
        """The version of a patched build: `0.21.0+r3.1`, for the CPU `0.21.0+r3.1.cpu`."""
        return f"{self.version}+r3.{self.revision}" + (".cpu" if target == "cpu" else "")


class Series(NamedTuple):
    """A folder that was read: its pin, and the bytes of each patch by name, first applied first."""

    folder: Path
    pin: Pin
    raw: dict[str, bytes]

    @property
    def order(self) -> list[str]:
        """The patch file names."""
        return list(self.raw)

    @property
    def hash(self) -> str:
        """The sha256 of SHA256SUMS as it would be for these patches."""
        return sha256(render_sums(self.raw))

    def patches(self) -> list[Patch]:
        """Parse every patch."""
        return [parse_patch(name, data) for name, data in self.raw.items()]


def sha256(data: bytes) -> str:
    """Return the sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


def render_sums(patches: Mapping[str, bytes]) -> bytes:
    """Return the bytes of SHA256SUMS for patches in their order."""
    return "".join(f"{sha256(data)}  {name}\n" for name, data in patches.items()).encode()


def series_folder(vllm: str = DEFAULT) -> Path:
    """Return the series on a vLLM: this checkout's, else the one that an installed vllm_r3 carries.

    Raises:
        R3Error: there is none on this version.
    """
    package = Path(__file__).resolve().parents[1]
    carried = package / "patches"
    root = carried if carried.exists() else package.parent / "patches"
    folder = root / f"v{vllm}"
    if not folder.exists():
        known = sorted(path.name.removeprefix("v") for path in root.glob("v*"))
        raise R3Error(f"vLLM {vllm}: expected one with a series, {' or '.join(known)}")
    return folder


def read_series(folder: Path | None = None) -> Series:
    """Read a series folder, the default one if none; refuse one that lists what is not there."""
    folder = folder or series_folder()
    pin = read_pin(folder)
    names = [line for line in read_lines(folder) if is_patch(line)]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise R3Error(f"{folder / 'series'} lists files that are not there: {', '.join(missing)}")
    return Series(folder, pin, {name: (folder / name).read_bytes() for name in names})


def read_toml(path: Path) -> dict[str, Any]:
    """Read one TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise R3Error(f"{path}: expected this file, found none") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise R3Error(f"{path}: not valid TOML: {error}") from error


def read_pin(folder: Path) -> Pin:
    """Read the pin of a series folder."""
    path = folder / "pin.toml"
    raw = read_toml(path)
    try:
        return Pin(
            vllm=raw["vllm"],
            commit=raw["commit"],
            revision=int(raw["revision"]),
            target_specific=tuple(raw["target_specific"]),
            wheels={target: PinnedWheel(**raw["wheel"][target]) for target in TARGETS},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise R3Error(f"{path}: a field is missing, unknown or wrong: {error}") from error


def read_lines(folder: Path) -> tuple[str, ...]:
    """Return the lines of `series`, stripped."""
    path = folder / "series"
    if not path.is_file():
        raise R3Error(f"{path}: expected the list of patches, found no file")
    return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines())


def is_patch(line: str) -> bool:
    """Return whether a line of `series` is a file name, not a heading or empty."""
    return bool(line) and not line.startswith("#")


def reorder(lines: Iterable[str], order: Iterable[str]) -> tuple[str, ...]:
    """Return the lines of `series` for a new order, each patch below the heading it had.

    A new patch goes below the heading of the patch before it; a heading without patches is dropped.
    """
    heading: list[str] = []
    headings: dict[str, list[str]] = {}
    for is_name, group in itertools.groupby(lines, is_patch):
        if is_name:
            headings |= dict.fromkeys(group, heading)
        else:
            heading = list(group)
    out: list[str] = []
    current = next(iter(headings.values()), heading)
    shown: list[str] = []
    for name in order:
        current = headings.get(name, current)
        out += [*(current if current != shown else ()), name]
        shown = current
    return tuple(out)
