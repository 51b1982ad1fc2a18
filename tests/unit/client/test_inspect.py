"""`inspect` counts choices per layer and says how even they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fake_server import serving
from sample_answers import refused, rows_of, split_answer

from vllm_r3.checks.inspect import expert_load, heat_map, read_rows
from vllm_r3.client import RouteShape
from vllm_r3.errors import R3Error

NOTHING = RouteShape()


def test_an_even_load_has_full_entropy_and_a_single_expert_none() -> None:
    rows = np.zeros((8, 2, 1), np.uint8)
    rows[:, 0, 0] = np.arange(8)
    rows[:, 1, 0] = 3
    load = expert_load([rows], RouteShape(num_experts=8))
    np.testing.assert_allclose(load.entropy(), [3.0, 0.0])
    assert load.lines()[2] == "    0    3.000   100.0%    1.00x   1.00x       0  0, 1, 2"
    assert load.lines()[3] == "    1    0.000     0.0%    8.00x   0.00x       7  3, 0, 1"


def test_counts_add_up_over_samples() -> None:
    parts = [rows_of(5), rows_of(7, first=5)]
    load = expert_load(parts, RouteShape(num_experts=16))
    assert load.rows == 12 and load.counts_LE.shape == (3, 16)
    assert (load.counts_LE.sum(axis=1) == 24).all()
    np.testing.assert_array_equal(load.counts_LE, expert_load([rows_of(12)], NOTHING).counts_LE)


def test_dense_layers_stay_empty() -> None:
    rows = rows_of(6)
    rows[:, 1] = 0
    assert expert_load([rows], NOTHING).counts_LE[1].sum() == 0
    named = RouteShape(num_layers=3, num_experts=16, moe_layers=(1,))
    assert expert_load([rows_of(6)], named).counts_LE.sum(axis=1).tolist() == [0, 12, 0]


def test_impossible_rows_are_refused() -> None:
    with refused("expected rows to inspect, got none", R3Error):
        expert_load([rows_of(0)], NOTHING)
    with refused("expected rows of one model, got sides [(3, 2), (4, 2)]", R3Error):
        expert_load([rows_of(2), rows_of(2, layers=4)], NOTHING)
    with refused("rows: expected expert ids in [0, 4), got 4 at row 0, layer 1"):
        expert_load([rows_of(8)], RouteShape(num_experts=4))


def test_arrays_answers_rollouts_and_servers_are_read(tmp_path: Path) -> None:
    rows = rows_of(8)
    np.save(tmp_path / "rows.npy", rows)
    answer = split_answer(rows, 5) | {"prompt_token_ids": [1] * 5}
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    for name in ("rows.npy", "answer.json"):
        np.testing.assert_array_equal(read_rows(str(tmp_path / name), NOTHING)[0][0], rows)
    torch = pytest.importorskip("torch")
    samples = [
        {"tokens": [0] * 9, "rollout_routed_experts": rows},
        {"rollout_routed_experts": None},
    ]
    torch.save({"samples": samples}, tmp_path / "r.pt")
    np.testing.assert_array_equal(read_rows(str(tmp_path / "r.pt"), NOTHING)[0][0], rows)
    with serving() as url:
        found, shape = read_rows(url, NOTHING)
    assert shape.moe_layers == (1, 2)
    assert expert_load(found, shape).counts_LE[0].sum() == 0


def test_other_sources_are_refused(tmp_path: Path) -> None:
    with refused("nowhere.pt: expected a file or an address http://..., found neither", R3Error):
        read_rows("nowhere.pt", NOTHING)
    path = tmp_path / "flat.npy"
    np.save(path, np.zeros(3))
    with refused(f"{path}: expected integer rows (rows, L, K), got float64 (3,)", R3Error):
        read_rows(str(path), NOTHING)


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(
        R3Error, match=r"^drawing needs matplotlib \(.*\): pip install 'vllm-r3\[plot\]'$"
    ):
        heat_map(expert_load([rows_of(8)], NOTHING), tmp_path / "x.png")
