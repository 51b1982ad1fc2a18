"""A stock server answers HTTP 200 with right shapes and zero rows; `verify server` must say so.

Needs the stock 0.22.1 CPU build, which the test environment (0.21.0 patched) cannot hold: set
VLLM_R3_STOCK_0_22 to the command that runs its `vllm`, as "/path/to/venv/bin/vllm".
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from server_fixture import OPTIONS, SERVER_ENV

from vllm_r3.checks.server import verify_server
from vllm_r3.cli import main
from vllm_r3.demo.serve import HOST, Server

COMMAND = os.environ.get("VLLM_R3_STOCK_0_22")


@pytest.mark.skipif(
    COMMAND is None,
    reason="VLLM_R3_STOCK_0_22 does not name the vllm command of a stock 0.22.1 CPU build",
)
def test_stock_022_fails_and_what_it_lacks_is_named(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = shlex.split(COMMAND or "")
    options = (*OPTIONS, "--enable-return-routed-experts")
    log, env = tmp_path / "server.log", SERVER_ENV
    with Server(models("moe"), *options, log_path=log, env=env, vllm=command) as server:
        url = f"http://{HOST}:{server.port}"
        assert main(["verify", "server", url]) == 1
        report = verify_server(url)
    print(capsys.readouterr().out)
    assert report.version.startswith("0.22.")
    problems = {result.name: result.problem for result in report.results}
    assert "rows from /inference/v1/generate" in report.names("ok")
    values = problems["row values: different experts in every MoE layer"]
    assert values == "zero MoE layer: layers 0-3 of 4 are all zeros"
    assert "warm equals cold" in report.names("not checked")
    assert set(report.names("FAILED")) >= {
        "GET /routed_experts/info",
        "routed_experts_meta",
        "routed_experts_prompt_start",
        "return_routed_experts false",
        "routed_experts_encoding and routed_experts_layout",
    }
