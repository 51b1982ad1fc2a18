"""Two pipeline stages: MoE layers 1 and 2 of six in the first, 4 in the last.

Also test_model_shapes.py (cold, warm, shared prefixes) and test_preemption.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import seeded_prompts

from vllm_r3.checks.rows import differing_cells

pytestmark = pytest.mark.parametrize("running", ["two-stages"], indirect=True, scope="module")


def test_two_stages_are_two(running):
    config = running.llm.llm_engine.vllm_config.parallel_config
    assert (config.pipeline_parallel_size, config.world_size) == (2, 2)


def test_each_stage_fills_its_own_layers(running):
    """A stage whose rows get lost leaves its layers zero, or those of another step."""
    prompts = seeded_prompts(81, [50, 120, 7])
    for prompt, output in zip(prompts, running.generate(prompts, max_tokens=20), strict=True):
        tokens = prompt + list(output.outputs[0].token_ids)
        found = [output.prompt_routed_experts, output.outputs[0].routed_experts]
        rows, truth = np.concatenate(found), running.oracle.truth(tokens).rows
        wrong = differing_cells(rows, truth).sum(axis=0).tolist()
        assert wrong == [0] * 6, f"wrong rows by layer: {wrong}"
        assert [n for n in range(6) if rows[:, n].any(axis=-1).all()] == [1, 2, 4]


@pytest.mark.parametrize("layout", ["split", "full"])
def test_sixteen_requests_at_once_with_three_choices(running, layout):
    prompts = seeded_prompts(82, [3 + 17 * i for i in range(16)])
    options = dict(n=3, temperature=1.0, max_tokens=25)
    running.check(prompts, **options, routed_experts_layout=layout)


def test_requests_that_end_early_and_late_share_steps(running):
    prompts = seeded_prompts(83, [30, 90, 140, 33])
    running.check(prompts, max_tokens=1)
    running.check(prompts, max_tokens=80, stop=["\x00never"], min_tokens=60)
