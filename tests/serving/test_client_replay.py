"""In bfloat16, where routers of two implementations part, replayed rows bring the mismatch down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server_fixture import Kit

from vllm_r3.cli import main


def test_in_bfloat16_the_replayed_mismatch_is_smaller_than_the_free_one(
    bfloat16: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", str(bfloat16.model_dir), "--server", bfloat16.url, "--dtype", "bfloat16"]
    files = ["--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png")]
    assert main([*words, *files, "--texts", "8", "--max-tokens", "64"]) == 0
    print(capsys.readouterr().out)
    report = json.loads((tmp_path / "r.json").read_text())
    free, replayed = report["free"], report["replayed"]
    assert report["rows_differing"] > 0.005
    assert replayed["mean_kl"] < free["mean_kl"] / 2
    assert replayed["max_abs_delta"] < free["max_abs_delta"]
    assert replayed["mean_abs_delta"] < free["mean_abs_delta"]
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
