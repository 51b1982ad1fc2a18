"""A miniature of everything: a wheel of a few files, a series folder, an installed copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import Lab


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A fresh miniature with an empty series and nobody's git configuration."""
    monkeypatch.delenv("VLLM_R3_WHEEL", raising=False)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    made = Lab(tmp_path)
    monkeypatch.setenv("VLLM_R3_CACHE", str(tmp_path / "wheels"))
    return made


@pytest.fixture
def patched_lab(lab: Lab) -> Lab:
    """A miniature whose series has two patches: edits, a new file, an empty one, a removed one."""
    lab.write_two_patches()
    return lab
