"""A model whose layers need two KV-cache groups, sliding window and full attention.

Only the full-attention group keeps a slot for every token. Prompts are several windows
long, so the other group has given blocks back when the rows are read.
"""

from __future__ import annotations

import pytest
from engines import seeded_prompts

WINDOW = 32
pytestmark = pytest.mark.parametrize("running", ["exaone"], indirect=True, scope="module")


def specs(running):
    manager = running.scheduler.kv_cache_manager
    return [type(g.kv_cache_spec).__name__ for g in manager.kv_cache_config.kv_cache_groups]


def test_the_model_has_both_kinds_of_groups(running):
    assert sorted(set(specs(running))) == ["FullAttentionSpec", "SlidingWindowSpec"]


def test_table_is_as_large_as_the_pool_all_groups_share(running):
    table = running.scheduler.routed_experts_manager.table
    assert table.shape == (200 * 16, 4, 4)


def test_prompts_longer_than_the_window_cold_and_warm(running):
    prompts = seeded_prompts(91, [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 200])
    for prompt in prompts:
        running.check([prompt], max_tokens=30)
    (warm,) = running.check(prompts[-1:], max_tokens=30)
    assert warm.num_cached_tokens > 0


def test_rows_after_preemption_equal_the_oracle(running):
    with running.few_blocks(60) as preempted:
        running.check(seeded_prompts(92, [90, 91, 92, 93, 94, 95, 96, 97]), max_tokens=90)
    assert preempted
    assert set(running.leftovers().values()) == {0}, running.leftovers()
