# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows follow the KV cache to a tier beside the GPU's and back."""

import contextlib
import random

import numpy as np
import pytest
from test_random_lifecycles import Life

from offloading import OffloadingEngine, make_offloading_engine
from vllm.v1.core.routed_experts_tier import RoutedExpertsTier

SIMPLE = {"connector": "SimpleCPUOffloadConnector"}
PROMPT = list(range(10, 34))
OTHERS = [list(range(50 + 30 * k, 80 + 30 * k)) for k in range(4)]


class LongLife(Life):
    """Enough requests for prefixes to leave the pool and to come back."""

    def __init__(
        self, engine: OffloadingEngine, seed: int, resets: bool, updates: bool
    ) -> None:
        super().__init__(engine, seed, resets=resets, updates=updates)
        self.num_requests = 25
        if resets:
            reset = engine.reset

            def reset_if_nothing_is_held() -> None:
                # A transfer that holds blocks stands in the way, as vLLM says.
                with contextlib.suppress(RuntimeError):
                    reset()

            engine.reset = reset_if_nothing_is_held


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"is_async": True},
        {"is_async": True, "factor": 3},
        {"is_async": True, "extra": {"eviction_policy": "arc"}},
        {"is_async": True, "extra": {"store_threshold": 2}},
        {"is_async": True, "num_drafts": 3},
        {"is_async": True, "policy": "priority"},
        {"is_async": True, "resets": True},
        {"is_async": True, "updates": True},
        {"depth": 2},
        SIMPLE,
        SIMPLE | {"is_async": True},
        SIMPLE | {"is_async": True, "extra": {"lazy_offload": True}},
        SIMPLE | {"is_async": True, "resets": True, "updates": True},
    ],
    ids=lambda kind: "-".join(f"{k}={v}" for k, v in kind.items()) or "plain",
)
def test_no_life_with_a_tier_returns_a_wrong_row(model: str, kind: dict):
    kind = dict(kind)
    resets, updates = kind.pop("resets", False), kind.pop("updates", False)
    num_cells = num_loaded = num_preempted = 0
    for seed in range(5):
        source = random.Random(seed)
        # In a smaller pool the simple connector's loads and a resumed request may wait
        # for each other, with rows or without.
        pools = [23, 27] if "connector" in kind else [13, 15, 19]
        engine = make_offloading_engine(
            model,
            source.choice(pools),
            source.choice([12, 20, 40]),
            seed=seed,
            max_num_batched_tokens=source.choice([16, 17, 33, 64]),
            **kind,
        )
        life = LongLife(engine, seed, resets, updates)
        life.run()
        engine.settle()
        for request_id, answer in engine.answers.items():
            if request_id not in life.aborted:
                engine.assert_tokens(request_id)
            if answer.token_ids:
                engine.assert_rows(request_id)
                num_cells += answer.rows.size
        engine.assert_nothing_is_kept()
        num_loaded += engine.copies.num_loaded_blocks
        num_preempted += sum(len(s.preempted_req_ids or ()) for s in engine.steps)
    assert num_cells > 20_000
    assert num_loaded > 5
    assert num_preempted > 0


@pytest.mark.parametrize("kind", [{}, {"factor": 2}, SIMPLE])
@pytest.mark.parametrize("first_wants_rows", [True, False])
def test_rows_come_back_after_eviction_and_not_those_of_the_slots_last_owner(
    model: str, kind: dict, first_wants_rows: bool
):
    engine = make_offloading_engine(model, 10, 60, **kind)
    engine.add("first", PROMPT, return_routed_experts=first_wants_rows)
    engine.run()
    engine.settle()
    for i, prompt in enumerate(OTHERS):
        engine.add(f"other{i}", prompt)
        engine.run()
    num_loaded = engine.copies.num_loaded_blocks
    assert num_loaded == 0
    engine.add("again", PROMPT)
    engine.run()
    assert engine.copies.num_loaded_blocks >= len(PROMPT) // 4 - 2
    engine.assert_rows("again")
    first, again = engine.answers["first"], engine.answers["again"]
    assert first.token_ids == again.token_ids
    if first_wants_rows:
        # The last token is computed again.
        num_hits = min(4 * engine.copies.num_loaded_blocks, len(PROMPT) - 1)
        np.testing.assert_array_equal(first.rows[:num_hits], again.rows[:num_hits])


@pytest.mark.parametrize("kind", [{}, SIMPLE])
def test_a_reset_of_the_prefix_cache_leaves_rows_and_kv_of_the_tier_together(
    model: str, kind: dict
):
    engine = make_offloading_engine(model, 20, 60, **kind)
    engine.add("first", PROMPT)
    engine.run()
    engine.settle()
    engine.reset()
    engine.add("again", PROMPT)
    engine.run()
    assert engine.copies.num_loaded_blocks > 0
    engine.assert_all_rows()


@pytest.mark.parametrize("is_async", [True, False])
def test_a_reset_leaves_no_store_behind_that_takes_another_owners_blocks(
    model: str, is_async: bool
):
    engine = make_offloading_engine(model, 9, 60, is_async=is_async)
    engine.copies.ends_now = lambda: False
    engine.add("first", PROMPT)
    engine.launch()
    engine.reset()
    engine.drain()
    engine.add("other", OTHERS[0][:20])
    engine.launch()
    assert all(copy.has_ended for copy in engine.copies.jobs)
    engine.copies.ends_now = lambda: True
    engine.run()
    engine.assert_all_rows()


@pytest.mark.parametrize("kind", [{}, SIMPLE])
def test_what_the_tier_holds_without_rows_is_computed_again(model: str, kind: dict):
    engine = make_offloading_engine(model, 20, 60, **kind)
    engine.runner.loses = lambda request_id, position, step: position == 6
    engine.add("first", PROMPT, return_routed_experts=False)
    engine.run()
    engine.settle()
    assert engine.copies.num_stored_blocks >= 5
    engine.runner.loses = lambda request_id, position, step: False
    engine.reset()
    engine.add("again", PROMPT)
    engine.run()
    # One block before the row that is missing, and none behind it.
    assert engine.copies.num_loaded_blocks == 1
    engine.assert_rows("again")


def test_a_block_that_has_a_new_owner_gives_no_rows_to_the_tier(model: str):
    engine = make_offloading_engine(model, 20, 60)
    engine.add("first", PROMPT)
    engine.run()
    manager = engine.scheduler.routed_experts_manager
    tier = RoutedExpertsTier(manager, 4)
    full = np.flatnonzero(manager.table.has_all_rows(np.arange(20)))[:2]
    step = manager.step
    tier.store_after(step, [3, 1], full)
    manager.table.hand_out([int(full[0])], step + 1)
    assert not tier.has_rows([3, 1]).any()
    tier.end_step(step)
    assert tier.has_rows([3, 1]).tolist() == [False, True]
    tier.forget([1])
    assert not tier.has_rows([1]).any()


def test_the_tiers_memory_is_counted_and_bounded_by_its_blocks(model: str):
    engine = make_offloading_engine(model, 20, 60, factor=2)
    stats = engine.scheduler.routed_experts_manager.take_stats()
    rows = 60 * 2 * 4 * 3 * 4 * 2
    versions = 60 * 2 * 4 * 4
    assert stats.tier_bytes == rows + versions + 60 * 2
    assert engine.scheduler.routed_experts_manager.take_stats() == stats
