# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A request preempted in the schedule() that scheduled it leaves no block unfilled.

The worker finds, at every hit, what the KV cache was promised to hold.
"""

import pytest

from scheduling import FULL, SLIDING, make_engine
from vllm.v1.kv_cache_interface import KVCacheGroupSpec


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("groups", "num_blocks", "num_urgent_tokens"),
    [
        ([FULL], 12, 4),
        ([FULL], 13, 8),
        ([FULL], 14, 12),
        ([FULL, SLIDING], 23, 8),
        ([FULL, SLIDING], 25, 12),
    ],
)
def test_every_cached_block_that_is_hit_has_been_filled(
    model: str,
    groups: list[KVCacheGroupSpec],
    num_blocks: int,
    num_urgent_tokens: int,
    is_async: bool,
):
    engine = make_engine(
        model,
        num_blocks,
        groups,
        is_async=is_async,
        policy="priority",
        long_prefill_token_threshold=16,
        returns_rows=False,
    )
    engine.add("victim", list(range(44)), max_tokens=3, priority=3)
    engine.step()
    # Its first new block is one of those that the victim was just given.
    urgent = list(range(100, 100 + num_urgent_tokens))
    engine.add("urgent", urgent, max_tokens=6, priority=0)
    engine.run()
    assert engine.num_preemptions("victim") > 0
    engine.assert_tokens("victim")
    engine.assert_tokens("urgent")
