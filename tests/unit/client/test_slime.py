"""Samples get exactly the trainer's shape; servers get the flags that replay needs, no more."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sample_answers import full_answer, npy, refused, rows_of, sglang_answer, split_answer

from vllm_r3.adapters.slime import assign_routed_experts, engine_flags
from vllm_r3.client import StreamedAnswer

ALL = rows_of(40)
ARGS = SimpleNamespace(num_layers=3, moe_router_topk=2, num_experts=16)


def sample_of(count: int, held: Any = None) -> Any:
    return SimpleNamespace(
        index=4, tokens=list(range(100, 100 + count)), rollout_routed_experts=held
    )


@pytest.mark.parametrize("form", [split_answer, full_answer, sglang_answer])
def test_a_sample_gets_int32_rows_for_all_tokens_but_the_last(form: Any) -> None:
    sample = sample_of(9)
    assert assign_routed_experts(sample, form(ALL[:8], 5), ARGS) == ""
    assert sample.rollout_routed_experts.shape == (9 - 1, ARGS.num_layers, ARGS.moe_router_topk)
    assert sample.rollout_routed_experts.dtype == np.int32
    np.testing.assert_array_equal(sample.rollout_routed_experts, ALL[:8])


@pytest.mark.parametrize("kind", ["array", "tensor", "chunks", "lists"])
def test_a_later_turn_keeps_the_rows_before_its_start(kind: str) -> None:
    torch = pytest.importorskip("torch")
    first = ALL[:8].astype(np.int32)
    held = {
        "array": first,
        "tensor": torch.from_numpy(first),
        "chunks": [torch.from_numpy(first[:3]), torch.from_numpy(first[3:])],
        "lists": first.tolist(),
    }[kind]
    sample = sample_of(13, held)
    assign_routed_experts(sample, split_answer(ALL[:12], 10, start=8), ARGS)
    np.testing.assert_array_equal(sample.rollout_routed_experts, ALL[:12])


def test_a_resume_doubles_no_row_and_keeps_the_boundary_tokens_real_one() -> None:
    sample = sample_of(13, ALL[:8].astype(np.int32))
    fresh = rows_of(12, first=7)
    assign_routed_experts(sample, split_answer(fresh, 9, start=6), ARGS)
    assert sample.rollout_routed_experts.shape == (12, 3, 2)
    np.testing.assert_array_equal(sample.rollout_routed_experts[:6], ALL[:6])
    np.testing.assert_array_equal(sample.rollout_routed_experts[6:], fresh[6:])


@pytest.mark.parametrize(
    ("held", "found"), [(None, (0, 3, 2)), (ALL[:7], (7, 3, 2)), (ALL[:9, :2], (9, 2, 2))]
)
def test_too_few_or_foreign_held_rows_are_refused_and_left_alone(held: Any, found: tuple) -> None:
    sample = sample_of(13, held)
    with refused(f"sample 4: expected at least (8, 3, 2) held rows before start 8, got {found}"):
        assign_routed_experts(sample, split_answer(ALL[:12], 10, start=8), ARGS)
    assert sample.rollout_routed_experts is held


def test_an_answer_to_other_tokens_is_refused() -> None:
    sample = sample_of(9)
    sample.tokens[-1] = 7
    with refused("sample 4: expected sample.tokens to end with the answer's 4 tokens, got others"):
        assign_routed_experts(sample, split_answer(ALL[:8], 5), ARGS)


def test_a_sample_whose_tokens_were_not_appended_yet_is_refused() -> None:
    with refused(
        "sample 4: expected an answer that ends at 5 tokens, got 5 + 4: "
        "append its tokens to sample.tokens first"
    ):
        assign_routed_experts(sample_of(5), sglang_answer(ALL[:8], 5), ARGS)


def test_an_abort_before_any_token_leaves_the_sample_and_says_so() -> None:
    sample = sample_of(5)
    answer = {"choices": [{"index": 0, "token_ids": [], "finish_reason": "abort"}]}
    note = assign_routed_experts(sample, answer, ARGS)
    assert note == "request sample 4, choice 0: aborted after 0 tokens, without rows"
    assert sample.rollout_routed_experts is None


def test_args_without_the_models_sides_are_refused() -> None:
    with refused("sample 4: args must have num_layers and moe_router_topk"):
        assign_routed_experts(sample_of(9), full_answer(ALL[:8], 5), SimpleNamespace(num_layers=3))


def test_moe_layer_freq_spreads_stock_021s_rows_over_all_layers() -> None:
    sides = {"num_layers": 4, "moe_router_topk": 2, "num_experts": 16}
    args = SimpleNamespace(**sides, moe_layer_freq=[0, 1, 1, 1])
    sample = sample_of(9)
    answer = split_answer(ALL[:8], 5, encode=np.ndarray.tolist) | {"routed_experts_meta": None}
    assign_routed_experts(sample, answer, args)
    np.testing.assert_array_equal(sample.rollout_routed_experts[:, 1:], ALL[:8])
    assert not sample.rollout_routed_experts[:, 0].any()


@pytest.mark.parametrize("server", ["r3", "0.21", "0.22"])
def test_replay_off_adds_no_flag(server: str) -> None:
    args = SimpleNamespace(vllm_enable_expert_parallel=True)
    assert engine_flags(args, server=server) == []


def replaying(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(use_rollout_routing_replay=True, **more)


ON = "--enable-return-routed-experts"
STOCK_021 = [ON, "--no-async-scheduling", "--no-enable-prefix-caching"]


@pytest.mark.parametrize(("server", "flags"), [("r3", [ON]), ("0.22", [ON]), ("0.21", STOCK_021)])
def test_only_what_each_server_needs_is_added(server: str, flags: list[str]) -> None:
    assert engine_flags(replaying(), server=server) == flags


def test_expert_parallelism_placement_and_layout_follow_the_user() -> None:
    args = replaying(
        vllm_enable_expert_parallel=True, vllm_expert_placement_strategy="round_robin",
        vllm_routed_experts_layout="full", vllm_routed_experts_encoding=None,
    )  # fmt: skip
    flags = engine_flags(args)
    placement = ["--enable-expert-parallel", "--expert-placement-strategy", "round_robin"]
    assert flags == [ON, *placement, "--routed-experts-layout", "full"]
    assert engine_flags(args, server="0.22") == flags[:4]
    args.vllm_enable_expert_parallel = False
    assert "--enable-expert-parallel" not in engine_flags(args)


def test_defaults_that_the_user_did_not_name_are_no_overrides() -> None:
    args = replaying(
        vllm_expert_placement_strategy="linear", vllm_enable_prefix_caching=True,
        vllm_async_scheduling=None, _vllm_user_provided=set(),
    )  # fmt: skip
    assert engine_flags(args, server="0.21") == STOCK_021


def test_what_the_user_overrode_is_kept_and_warned_of() -> None:
    provided = {"vllm_enable_prefix_caching"}
    args = replaying(vllm_enable_prefix_caching=True, _vllm_user_provided=provided)
    message = "--vllm-enable-prefix-caching is kept as set, but cached rows come back as zeros"
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        flags = engine_flags(args, server="0.21")
    assert flags == [ON, "--no-async-scheduling"]


def test_an_unknown_server_is_refused() -> None:
    with refused("server must be one of r3, 0.21, 0.22, got sglang"):
        engine_flags(SimpleNamespace(), server="sglang")


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_cut_stream_leaves_a_sample_whose_rows_fit_its_tokens(cut: int) -> None:
    head, stream = split_answer(ALL[:5], 5, finish_reason=None), StreamedAnswer()
    after = [split_answer(ALL[:stop], stop, start=stop, finish_reason=None) for stop in (6, 7)]
    for row, chunk in enumerate(after, 5):
        chunk["routed_experts_meta"]["start"] = row
        del chunk["prompt_routed_experts"]
        chunk["choices"][0]["routed_experts"] = npy(ALL[row : row + 1])
    for chunk in [head, *after][:cut]:
        stream.add(chunk)
    sample = sample_of(5 + cut)
    note = assign_routed_experts(sample, stream, ARGS)
    if cut:
        np.testing.assert_array_equal(sample.rollout_routed_experts, ALL[: 4 + cut])
    else:
        assert "aborted after 0 tokens" in note and sample.rollout_routed_experts is None
