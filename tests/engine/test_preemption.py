"""A block pool too small for its requests: preemption, resume, eviction, by value."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from engines import BLOCK, seeded_prompts

BLOCKS = 23
pytestmark = pytest.mark.parametrize(
    "running", ["moe", "moe-async", "two-stages"], indirect=True, scope="module"
)


@pytest.fixture(autouse=True)
def preempted(running):
    """Preemptions by request, so that a test can prove that there were some."""
    with running.few_blocks(BLOCKS) as preempted:
        yield preempted


def test_rows_after_preemption_equal_the_oracle(running, preempted):
    prompts = seeded_prompts(41, [60, 61, 62, 63, 64, 65])
    running.check(prompts, max_tokens=60)
    assert len(preempted) >= 2, preempted
    assert set(running.leftovers().values()) == {0}, running.leftovers()


def test_first_pass_wins_over_the_one_after_preemption(running, preempted, monkeypatch):
    """Rows of tokens that are computed again are spoiled on their way to the table."""
    manager = running.scheduler.routed_experts_manager
    write, spoiled = manager.table.write, Counter()

    def spoil(step_rows, step):
        slots, rows = step_rows
        again = np.isin(slots, [s for r in list(preempted) for s in saved_slots(running, r)])
        spoiled["rows"] += int(again.sum())
        return write(type(step_rows)(slots, np.where(again[:, None, None], 255, rows)), step)

    monkeypatch.setattr(manager.table, "write", spoil)
    prompts = seeded_prompts(47, [60, 61, 62, 63, 64, 65])
    running.check(prompts, max_tokens=60)
    assert spoiled["rows"] > 50, spoiled


def saved_slots(running, request_id):
    """Slots of those tokens of a preempted request whose rows are kept from the first pass."""
    manager, request = running.scheduler.routed_experts_manager, running.scheduler.requests
    if request_id not in request:
        return []
    (blocks, *_) = running.scheduler.kv_cache_manager.get_block_ids(request_id)
    kept = min(len(manager._saved.get(request_id, ())), len(blocks) * BLOCK)
    return [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(kept)]


def test_preempted_with_a_stop_string_and_several_choices(running, preempted):
    prompts = seeded_prompts(42, [50, 51, 52])
    running.check(prompts, max_tokens=60, n=2, temperature=1.0, stop=["\x00never"], min_tokens=50)
    assert preempted


def test_prompts_evicted_from_the_cache_are_computed_again(running):
    (first,) = seeded_prompts(43, [100])
    running.check([first])
    (warm,) = running.check([first])
    assert warm.num_cached_tokens == 96
    for prompt in seeded_prompts(44, [200, 210, 220]):
        running.check([prompt])
    (again,) = running.check([first])
    assert again.num_cached_tokens == 0


def test_partly_evicted_prefix(running):
    (first,) = seeded_prompts(45, [200])
    running.check([first])
    (other,) = seeded_prompts(46, [190])
    running.check([other])
    (again,) = running.check([first])
    assert 0 < again.num_cached_tokens < 192
    assert again.num_cached_tokens % BLOCK == 0
