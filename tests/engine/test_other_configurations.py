"""Two tensor-parallel ranks, torch.compile and layout full: rows by value."""

from __future__ import annotations

from engines import engine, environment, seeded_prompts

LENGTHS = [3, 15, 16, 17, 33, 90]


def test_rows_with_two_tensor_parallel_ranks_equal_the_oracle(models, oracles):
    # by default two ranks want two NUMA nodes
    two_ranks = engine(models("moe"), oracles("moe"), tensor_parallel_size=2)
    with environment(VLLM_CPU_OMP_THREADS_BIND="0|1"), two_ranks as running:
        prompts = seeded_prompts(71, LENGTHS)
        running.check(prompts)
        running.check(prompts)


def test_rows_under_torch_compile_equal_the_oracle(models, oracles):
    """0.22.1 returns zeros here: its graph is traced before the capture is bound."""
    options = dict(compiled=True, routed_experts_layout="full")
    with engine(models("moe"), oracles("moe"), **options) as running:
        mode = running.llm.llm_engine.vllm_config.compilation_config.mode
        assert mode.name == "DYNAMO_TRACE_ONCE"
        prompts = seeded_prompts(72, LENGTHS)
        running.check(prompts, max_tokens=30)
        outputs = running.check(prompts, max_tokens=30)
        # the engine's layout holds in process too, unless the request names another
        assert all(output.prompt_routed_experts is None for output in outputs)
        (output,) = running.check(prompts[:1], routed_experts_layout="split")
        assert output.prompt_routed_experts.shape == (3, 4, 4)
