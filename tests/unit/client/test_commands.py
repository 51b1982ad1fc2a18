"""The commands parse, print to stdout, and exit 0, 1 or 2 as promised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_server import serving
from sample_answers import rows_of

from vllm_r3.cli import build_parser
from vllm_r3.commands.checks import layer_numbers


def run(*words: str) -> int:
    args = build_parser().parse_args(words)
    return args.func(args)


def rollout(path: Path, rows: np.ndarray) -> str:
    torch = pytest.importorskip("torch")
    sample = {"index": 0, "tokens": list(range(9)), "rollout_routed_experts": rows}
    torch.save({"rollout_id": 0, "samples": [sample]}, path)
    return str(path)


SIDES = ["--num-layers", "3", "--moe-router-topk", "2", "--min-samples-with-routing", "1"]


def test_verify_rollout_exits_0_for_good_rows_and_1_for_bad_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rollout(tmp_path / "r.pt", rows_of(8))
    assert run("verify", "rollout", path, *SIDES, "--all") == 0
    assert capsys.readouterr().out == f"sample 0: ok\n{path}: 1 samples, 1 with routing\n  1 ok\n"
    assert run("verify", "rollout", rollout(tmp_path / "r.pt", rows_of(7)), *SIDES) == 1
    assert (
        "sample 0: wrong rows\n  expected (8, 3, 2) for 9 tokens, got (7, 3, 2)\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("kind", "status"), [("r3", 0), ("vllm", 1)])
def test_verify_server_exits_0_only_where_the_contract_holds(
    kind: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(kind) as url:
        assert run("verify", "server", url, "--prompt-tokens", "20", "--max-tokens", "3") == status
    assert capsys.readouterr().out.startswith(f"{url}: vLLM 0.2")


@pytest.mark.parametrize(("share", "status"), [("1", 1), ("0", 0)])
def test_compare_exits_1_below_the_wanted_agreement(share: str, status: int) -> None:
    with serving() as a, serving("r3", ("other rows",)) as b:
        assert run("compare", a, b, "--min-agreement", share, "--prompt-tokens", "9") == status


def test_inspect_prints_a_table_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    np.save(tmp_path / "rows.npy", rows_of(8))
    png = tmp_path / "load.png"
    assert run("inspect", str(tmp_path / "rows.npy"), "--png", str(png), "--num-experts", "16") == 0
    got = capsys.readouterr()
    assert got.out.startswith("8 rows, 3 layers, 16 experts, top-2\nlayer  entropy  of even  ")
    assert got.err == f"heat map: {png}\n" and png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words",
    ["verify", "verify rollout x.pt", "compare http://x", "replay model"]
    + [" ".join(["verify rollout x.pt", *SIDES, "--moe-layers a-b"])]
    + ["replay model --server x --dtype int8"],
)
def test_wrong_usage_exits_2(words: str) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        run(*words.split())


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", (3,)), ("3-5", (3, 4, 5)), ("1,3,5-6", (1, 3, 5, 6)), ("0-0", (0,))]
)
def test_layer_lists_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert layer_numbers(text) == numbers
