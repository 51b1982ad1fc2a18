"""What `series verify` finds: one fixed phrase and one path each, all of one run together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One problem: `phrase` is one of a few fixed words, `where` a path, `detail` may be empty."""

    phrase: str
    where: str
    detail: str = ""

    def __str__(self) -> str:
        return f"  {self.phrase:<11} {self.where}" + (f": {self.detail}" if self.detail else "")


def counted(findings: Iterable[Finding]) -> str:
    """Return the closing line: `3 problems`, `1 problem`, `0 problems`."""
    number = len(list(findings))
    return f"{number} problem{'' if number == 1 else 's'}"
