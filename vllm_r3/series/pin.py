"""Read `pin.toml`: which vLLM a series is made for.

Imports the standard library, and tomli on Python 3.10.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_r3.errors import R3Error

if sys.version_info >= (3, 11):
    import tomllib
else:
    try:
        import tomli as tomllib
    except ModuleNotFoundError as error:
        raise R3Error(
            "the series tooling needs tomli on Python 3.10, which is not installed: "
            "pip install 'vllm-r3[series]'"
        ) from error

TARGETS = ("cpu", "cuda")


@dataclass(frozen=True)
class PinnedWheel:
    """One wheel of the index: distribution and version, file name, full sha256, dependency lock."""

    target: str
    distribution: str
    version: str
    file: str
    sha256: str
    lock: str


@dataclass(frozen=True)
class Pin:
    """The content of pin.toml."""

    vllm: str
    commit: str
    python: str
    revision: int
    target_specific: tuple[str, ...]
    wheels: dict[str, PinnedWheel]

    @property
    def version(self) -> str:
        """The public version of the base: `0.21.0`."""
        return self.vllm.removeprefix("v")

    def patched_version(self, target: str) -> str:
        """The version of a patched build: `0.21.0+r3.1`, for the CPU `0.21.0+r3.1.cpu`."""
        return f"{self.version}+r3.{self.revision}" + (".cpu" if target == "cpu" else "")


def read_toml(path: Path) -> dict[str, Any]:
    """Read one TOML file.

    Raises:
        R3Error: it is missing or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise R3Error(f"{path}: expected this file, found none") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise R3Error(f"{path}: not valid TOML: {error}") from error


def read_pin(folder: Path) -> Pin:
    """Read the pin of a series folder.

    Raises:
        R3Error: a field is missing or of another type.
    """
    path = folder / "pin.toml"
    raw = read_toml(path)
    try:
        return Pin(
            vllm=str(raw["vllm"]),
            commit=str(raw["commit"]),
            python=str(raw["python"]),
            revision=int(raw["revision"]),
            target_specific=tuple(raw["target_specific"]),
            wheels={
                target: PinnedWheel(target=target, **raw["wheel"][target]) for target in TARGETS
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        raise R3Error(f"{path}: a field is missing, unknown or wrong: {error}") from error
