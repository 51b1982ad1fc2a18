"""Put this folder's helper module on the path and choose the base64 decoders to test with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["pybase64", "base64"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test once with each base64 decoder."""
    from vllm_r3.client import npy

    if request.param == "base64":
        monkeypatch.setattr(npy, "pybase64", None)
    elif npy.pybase64 is None:
        pytest.skip("pybase64 is not installed")
    return request.param
