"""Async scheduling, which the CPU platform switches off, forced on: the scheduler runs one
step ahead of the sampled tokens, and a request ends one step after it has been scheduled
again."""

from __future__ import annotations

import pytest
from engines import END, seeded_prompts

pytestmark = pytest.mark.parametrize("running", ["moe-async"], indirect=True, scope="module")


def test_the_scheduler_runs_ahead(running):
    assert running.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    assert running.llm.llm_engine.engine_core.engine_core.batch_queue is not None


def test_mixed_lengths_cold_and_warm(running):
    prompts = seeded_prompts(51, [3, 15, 16, 17, 31, 32, 33, 39, 40, 41, 90, 120])
    running.check(prompts, max_tokens=30)
    running.check(prompts, max_tokens=30)


def test_staggered_ends_keep_the_rows_of_those_that_go_on(running):
    from vllm import SamplingParams

    prompts = seeded_prompts(52, [20 + i for i in range(12)])
    inputs = [{"prompt_token_ids": p} for p in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + 3 * i) for i in range(12)]
    outputs = running.llm.generate(inputs, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        running.compare(prompt, output)


def test_stop_by_end_of_text(running):
    outputs = running.check(seeded_prompts(53, [20, 25, 30]), min_tokens=5, logit_bias={END: 100.0})
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop"] * 3


def test_stop_by_token_id(running):
    (prompt,) = seeded_prompts(54, [20])
    (free,) = running.check([prompt], max_tokens=20)
    token = free.outputs[0].token_ids[9]
    (output,) = running.check([prompt], max_tokens=20, stop_token_ids=[token])
    assert output.outputs[0].stop_reason == token


def test_stop_by_string(running):
    (prompt,) = seeded_prompts(55, [33])
    (free,) = running.check([prompt], max_tokens=20)
    word = running.llm.get_tokenizer().decode(list(free.outputs[0].token_ids)[7:9])
    (output,) = running.check([prompt], max_tokens=20, stop=[word])
    assert output.outputs[0].stop_reason == word


def test_one_generated_token(running):
    (output,) = running.check(seeded_prompts(56, [20]), max_tokens=1)
    assert output.outputs[0].routed_experts.shape == (0, 4, 4)


def test_several_choices(running):
    running.check(seeded_prompts(57, [45, 50]), n=3, temperature=1.0)


def test_nothing_is_left_behind(running):
    running.check(seeded_prompts(58, [45, 50]))
    assert set(running.leftovers().values()) == {0}, running.leftovers()
