"""A miniature of everything: a wheel of a few files, a series folder, an installed copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sample_series import Lab


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A fresh miniature with an empty series and nobody's git configuration."""
    monkeypatch.delenv("VLLM_R3_WHEEL", raising=False)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    made = Lab(tmp_path)
    monkeypatch.setenv("VLLM_R3_CACHE", str(tmp_path / "wheels"))
    return made


@pytest.fixture(scope="session")
def two_patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A series folder with two patches, made once: edits, new files, an empty, a removed one."""
    made = Lab(tmp_path_factory.mktemp("two-patches"))
    made.write_two_patches()
    return made.folder


@pytest.fixture
def patched_lab(lab: Lab, two_patches: Path) -> Lab:
    """A miniature with a copy of that folder."""
    shutil.copytree(two_patches, lab.folder, dirs_exist_ok=True)
    return lab
