"""One server for most serving tests; the few others start their own, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import Kit, serving


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers' logs go."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def kit(models: Any, oracles: Any, logs: Path) -> Iterator[Kit]:
    """A server with the flag on and everything else at its default."""
    with serving(models("moe"), oracles("moe"), logs / "moe.log") as running:
        yield running
