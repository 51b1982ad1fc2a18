"""What the ranks of a data-parallel engine saw: written by each, read by the tests.

One line of JSON for each thing that is new to its rank, in a file that all ranks append to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_file: Path | None = None
_seen: set[str] = set()


def open_notes(path: str) -> None:
    """Choose this process's file; without one, nothing is written down."""
    global _file
    _file = Path(path)


def note(what: str, **seen: Any) -> None:
    """Write down what this rank saw, if it is new."""
    from torch import distributed

    if _file is None:
        return
    line = json.dumps({"what": what, "rank": distributed.get_rank()} | seen) + "\n"
    if line not in _seen:
        _seen.add(line)
        with _file.open("a") as notes:
            notes.write(line)


def read_notes(path: Path) -> list[dict[str, Any]]:
    """All that was written."""
    return [json.loads(line) for line in path.read_text().splitlines()]
