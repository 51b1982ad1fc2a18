"""Rows of every kind of tiny model, cold, from the prefix cache and on a shared prefix."""

from __future__ import annotations

import numpy as np
import pytest
from engines import BLOCK, engine, seeded_prompts

EDGES = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1]

# "moe" has its own, longer file: test_lifecycle.py
KINDS = ["dense-between", "wide", "glm4", "exaone", "qwen2", "mixtral", "olmoe"]


@pytest.fixture(scope="module", params=KINDS)
def running(request, models, oracles):
    kind = request.param
    with engine(models(kind), oracles(kind)) as running:
        running.kind = kind
        yield running


def test_rows_of_cold_warm_and_shared_prefixes_equal_the_oracle(running):
    prompts = seeded_prompts(7, [3, 90, *EDGES])
    running.check(prompts)
    warm = running.check(prompts)
    assert [o.num_cached_tokens for o in warm] == [(len(p) - 1) // BLOCK * BLOCK for p in prompts]
    tails = seeded_prompts(8, [5, 40])
    shared = running.check([prompts[1][:70] + tail for tail in tails])
    assert [o.num_cached_tokens for o in shared] == [64, 64]


def test_requests_as_long_as_the_window_keep_their_rows(running):
    """Every layer of Mixtral has a window, of max_model_len tokens."""
    if running.kind == "mixtral":
        manager = running.scheduler.kv_cache_manager
        specs = [type(g.kv_cache_spec).__name__ for g in manager.kv_cache_config.kv_cache_groups]
        assert specs == ["SlidingWindowSpec"]
    prompts = seeded_prompts(10, [500, 450, 511])
    running.check(prompts, max_tokens=12)
    running.check(prompts, max_tokens=1)


def test_dtype_and_layers_follow_the_model(running):
    (output,) = running.generate(seeded_prompts(9, [40]), max_tokens=40)
    rows = np.concatenate([output.prompt_routed_experts, output.outputs[0].routed_experts])
    info = running.scheduler.routed_experts_manager.info
    assert info.moe_layers == running.oracle.moe_layers
    assert rows.shape[1] == info.num_layers == running.oracle.num_layers
    assert rows.dtype == (np.int16 if running.kind == "wide" else np.uint8)
    assert (rows.max() > 255) == (running.kind == "wide")
