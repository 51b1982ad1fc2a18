"""Rollouts against a real server: turns, aborts, resumes, files, checks, all held to the oracle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from server_fixture import Kit, aborted

from vllm_r3.adapters.batch import pack_rows
from vllm_r3.adapters.slime import assign_routed_experts
from vllm_r3.checks.rows import differing_cells
from vllm_r3.cli import main
from vllm_r3.client import RolloutRoutes, decode_answer
from vllm_r3.replay.replay import replay, score

# the model of `kit`: MoE layers 1, 2 and 4 of 6
ARGS = SimpleNamespace(
    num_layers=6, moe_router_topk=4, num_experts=16, moe_layer_freq=[0, 1, 1, 0, 1, 0]
)
SIDES = ["--num-layers", "6", "--moe-router-topk", "4", "--num-experts", "16"]
MOE = ["--moe-layers", "1,2,4"]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(10, 400, length)]


def agree(kit: Kit, tokens: list[int], rows: np.ndarray) -> None:
    """Every cell holds the experts that the oracle chooses; order inside a cell means nothing."""
    truth = kit.oracle.truth(tokens).rows
    assert rows.shape == truth.shape
    assert not differing_cells(rows, truth).any()


def test_three_turns_with_prefix_omission_are_the_oracles_rows(kit: Kit) -> None:
    rollout = RolloutRoutes()
    tokens = prompt(40)
    for turn in range(3):
        start = rollout.next_start
        answer = kit.generate(tokens, 9, routed_experts_prompt_start=start)
        taken = rollout.add_turn(tokens, answer, start=start)
        assert taken.rows == len(rollout.tokens) - 1 - start
        tokens = rollout.tokens + prompt(13, seed=turn + 1)
    assert [turn.start for turn in rollout.turns] == [0, 48, 70]
    rows = rollout.finish()
    assert rows.shape == (len(rollout.tokens) - 1, 6, 4) and rows.dtype == np.uint8
    agree(kit, rollout.tokens, rows)


def is_aborted(answer: Any) -> bool:
    choice = answer["choices"][0]
    return choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < 900


def test_a_partial_rollout_is_resumed_without_a_doubled_row(kit: Kit) -> None:
    rollout = RolloutRoutes()
    tokens = prompt(40, seed=7)
    partial = aborted(kit, lambda: kit.generate(tokens, 900), is_aborted)
    turn = rollout.add_turn(tokens, partial)
    assert turn.rows == len(rollout.tokens) - 1 and turn.note == ""
    held, start = len(rollout.tokens), rollout.next_start
    resumed = kit.generate(rollout.tokens, 12, routed_experts_prompt_start=start)
    rollout.add_turn(rollout.tokens, resumed, start=start)
    assert rollout.num_rows == held + 12 - 1
    agree(kit, rollout.tokens, rollout.finish())


def samples_of(kit: Kit) -> list[dict[str, Any]]:
    """Two samples as slime and vime make them, one of two turns."""
    made = []
    for index in range(2):
        tokens = prompt(30, seed=20 + index)
        sample = SimpleNamespace(index=index, tokens=tokens, rollout_routed_experts=None)
        for _ in range(1 + index):
            start = (
                max(0, len(sample.tokens) - 1) if sample.rollout_routed_experts is not None else 0
            )
            answer = kit.generate(sample.tokens, 8, routed_experts_prompt_start=start)
            sample.tokens = sample.tokens + answer["choices"][0]["token_ids"]
            assert assign_routed_experts(sample, answer, ARGS) == ""
        made.append({**vars(sample), "status": "completed", "response_length": 8, "metadata": {}})
    return made


@pytest.fixture(scope="module")
def samples(kit: Kit) -> list[dict[str, Any]]:
    return samples_of(kit)


def test_samples_hold_the_trainers_shape_and_the_oracles_rows(
    kit: Kit, samples: list[dict[str, Any]]
) -> None:
    for sample in samples:
        rows = sample["rollout_routed_experts"]
        assert rows.shape == (len(sample["tokens"]) - 1, ARGS.num_layers, ARGS.moe_router_topk)
        agree(kit, sample["tokens"], rows)
    packed = pack_rows([sample["rollout_routed_experts"] for sample in samples], 16)
    assert len(packed) == sum(len(sample["tokens"]) for sample in samples)


def verify(path: Path, samples: list[dict[str, Any]]) -> int:
    torch.save({"rollout_id": 0, "samples": samples}, path)
    words = ["verify", "rollout", str(path), *SIDES, *MOE, "--min-samples-with-routing", "1"]
    return main(words)


def test_a_debug_rollout_file_of_real_samples_is_verified(
    samples: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tmp_path / "r.pt", samples) == 0
    out = capsys.readouterr().out
    assert out == f"{tmp_path / 'r.pt'}: 2 samples, 2 with routing\n  2 ok\n"


def test_verify_server_passes_ours(kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "server", kit.url]) == 0
    assert "15 checks: 15 ok, 0 FAILED, 0 not checked" in capsys.readouterr().out


def test_compare_finds_a_server_equal_to_itself(
    kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", kit.url, kit.url]) == 0
    assert "64 prompt tokens, 95 rows compared" in capsys.readouterr().out


def test_inspect_shows_dense_layers_empty_and_moe_layers_busy(
    kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", kit.url]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    bits = [float(line.split()[1]) for line in lines]
    assert [bool(value) for value in bits] == [False, True, True, False, True, False]
    assert all(3.0 < bits[layer] <= 4.0 for layer in (1, 2, 4))


def test_in_float32_both_mismatches_are_near_zero(kit: Kit) -> None:
    report = replay(str(kit.model_dir), kit.url, texts=4, max_tokens=24)
    assert report.dtype == "float32" and report.passed
    assert report.rows_differing < 1e-3
    for side in (report.free, report.replayed):
        assert side["mean_kl"] < 1e-8 and side["max_abs_delta"] < 2e-4


def test_rows_of_the_next_token_raise_the_mismatch(kit: Kit) -> None:
    """The control: what replay would say if the rows were off by one."""
    tokens = prompt(48, seed=3)
    answer = kit.generate(tokens, 16)
    (routes,) = decode_answer(answer, num_prompt=len(tokens))
    tokens += list(routes.token_ids or [])
    _, free = score(kit.oracle, tokens, None)
    _, right = score(kit.oracle, tokens, routes.rows)
    _, shifted = score(kit.oracle, tokens, np.roll(routes.rows, -1, axis=0))
    assert np.abs(right - free).max() < 2e-4
    assert np.abs(shifted - free).max() > 0.1
