"""Two ranks, a window in every layer, torch.compile and layout full; rows: test_model_shapes.py."""

from __future__ import annotations

import pytest
from engines import seeded_prompts

two_ranks = pytest.mark.parametrize("running", ["mixtral-two-ranks"], indirect=True)
compiled = pytest.mark.parametrize("running", ["olmoe-compiled"], indirect=True)


@two_ranks
def test_two_ranks_are_two(running):
    assert running.llm.llm_engine.vllm_config.parallel_config.world_size == 2


@two_ranks
def test_every_layer_of_mixtral_has_a_window(running):
    """It has max_model_len tokens, so that rows of whole requests are kept."""
    manager = running.scheduler.kv_cache_manager
    specs = [type(g.kv_cache_spec).__name__ for g in manager.kv_cache_config.kv_cache_groups]
    assert specs == ["SlidingWindowSpec"]


@compiled
def test_the_compiled_model_is_compiled(running):
    """0.22.1 returns zeros here: its graph is traced before the capture is bound."""
    mode = running.llm.llm_engine.vllm_config.compilation_config.mode
    assert mode.name == "DYNAMO_TRACE_ONCE"


@compiled
def test_layout_of_the_engine_holds_in_process_unless_the_request_names_another(running):
    outputs = running.check(seeded_prompts(72, [3, 17, 90]), max_tokens=30)
    assert all(output.prompt_routed_experts is None for output in outputs)
    (output,) = running.check(seeded_prompts(72, [3]), routed_experts_layout="split")
    assert output.prompt_routed_experts.shape == (3, 3, 4)
