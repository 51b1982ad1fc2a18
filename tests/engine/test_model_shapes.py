"""Rows of several families of models, cold, from the prefix cache and on a shared prefix.

Two tensor-parallel ranks, torch.compile and n-gram drafts have a family each, so that each takes
one start. "moe" has its own, longer file, test_lifecycle.py; tests/serving has a model with dense
layers between and one with more than 256 experts.
"""

from __future__ import annotations

import pytest
from engines import BLOCK, seeded_prompts

EDGES = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1]

pytestmark = pytest.mark.parametrize(
    "running",
    ["exaone", "two-stages", "mixtral-two-ranks", "olmoe-compiled", "qwen2-ngram", "glm4-mtp"],
    indirect=True,
    scope="module",
)


def test_rows_of_cold_warm_and_shared_prefixes_equal_the_oracle(running):
    speculation = running.llm.llm_engine.vllm_config.speculative_config
    # for the hidden states that an MTP layer starts from, vLLM computes the last hit block again
    again = int(speculation is not None and speculation.use_eagle())
    prompts = seeded_prompts(7, [3, 90, *EDGES])
    running.check(prompts)
    cached = [o.num_cached_tokens for o in running.check(prompts)]
    assert cached == [max((len(p) - 1) // BLOCK - again, 0) * BLOCK for p in prompts]
    tails = seeded_prompts(8, [5, 40])
    cached = [o.num_cached_tokens for o in running.check([prompts[1][:70] + t for t in tails])]
    assert cached == [(4 - again) * BLOCK] * 2


def test_requests_as_long_as_the_model_allows(running):
    prompts = seeded_prompts(10, [500, 450, 511])
    running.check(prompts, max_tokens=12)
    running.check(prompts, max_tokens=1)
