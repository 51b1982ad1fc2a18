"""What can happen to a request, by value: one engine, small steps, prefix cache on.

`max_num_batched_tokens` is below most prompts, so they are prefilled in chunks whose edges
lie inside blocks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import BLOCK, END, seeded_prompts

from vllm_r3.replay.oracle import Oracle

pytestmark = pytest.mark.parametrize("running", ["moe"], indirect=True, scope="module")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(running):
    yield
    assert set(running.leftovers().values()) == {0}, running.leftovers()


@pytest.fixture
def fresh(running):
    """Start from an empty prefix cache."""
    assert running.llm.reset_prefix_cache()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 39, 40, 41, 79, 80, 81, 200])
def test_prompt_lengths_around_block_and_chunk_edges(running, fresh, length):
    (prompt,) = seeded_prompts(100 + length, [length])
    (cold,) = running.check([prompt])
    (warm,) = running.check([prompt])
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (length - 1) // BLOCK * BLOCK


def test_128_requests_with_shared_prefixes_in_chunks_lose_no_row(running, fresh):
    heads = seeded_prompts(36, [50, 64, 70, 100])
    tails = seeded_prompts(37, [1 + i % 23 for i in range(128)])
    prompts = [heads[i % 4] + tail for i, tail in enumerate(tails)]
    outputs = running.check(prompts, max_tokens=6)
    assert sum(o.num_cached_tokens > 0 for o in outputs) > 90


def test_second_turn_returns_exactly_the_missing_rows(running, fresh):
    (prompt,) = seeded_prompts(14, [50])
    (first,) = running.check([prompt], max_tokens=20)
    tokens = [*prompt, *first.outputs[0].token_ids]
    turn = [*tokens, *seeded_prompts(15, [20])[0]]
    (second,) = running.check([turn], routed_experts_prompt_start=len(tokens) - 1)
    (whole,) = running.generate([turn])
    joined = [
        first.prompt_routed_experts,
        first.outputs[0].routed_experts,
        second.prompt_routed_experts,
    ]
    assert np.array_equal(np.concatenate(joined), whole.prompt_routed_experts)


@pytest.mark.parametrize("start", [0, 1, 16, 29, 30])
def test_prompt_start_leaves_out_the_first_rows(running, start):
    (prompt,) = seeded_prompts(16, [30])
    (output,) = running.check([prompt], routed_experts_prompt_start=start)
    assert output.prompt_routed_experts.shape == (30 - start, 4, 4)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("at", [0, 1, 7, 15])
def test_stop_by_string(running, at, include):
    (prompt,) = seeded_prompts(22, [33])
    (free,) = running.check([prompt], max_tokens=20)
    tokens = list(free.outputs[0].token_ids)
    word = running.llm.get_tokenizer().decode(tokens[at : at + 2])
    (output,) = running.check(
        [prompt], max_tokens=20, stop=[word], include_stop_str_in_output=include
    )
    choice = output.outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", word)
    assert list(choice.token_ids) == tokens[: len(choice.token_ids)]
    assert len(choice.token_ids) <= at + 2


def test_several_choices_share_the_prompt_and_differ_after_it(running, fresh):
    (output,) = running.check(seeded_prompts(26, [45]), n=4, temperature=1.0)
    assert output.prompt_routed_experts.shape == (45, 4, 4)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4


@pytest.mark.parametrize("start", [0, 17, 45])
def test_in_layout_full_each_choice_has_all_of_its_rows(running, fresh, start):
    (output,) = running.check(
        seeded_prompts(41, [45]),
        n=3,
        temperature=1.0,
        routed_experts_prompt_start=start,
        routed_experts_layout="full",
    )
    assert output.prompt_routed_experts is None
    for choice in output.outputs:
        assert choice.routed_experts.shape == (45 - start + 15, 4, 4)


def test_several_choices_of_different_lengths(running, fresh):
    (output,) = running.check(
        seeded_prompts(27, [45]), n=4, temperature=1.5, max_tokens=40, stop=["e"]
    )
    assert len({len(c.token_ids) for c in output.outputs}) > 1


def test_structured_output(running):
    from vllm.sampling_params import StructuredOutputsParams

    (prompt,) = seeded_prompts(28, [20])
    (output,) = running.generate(
        [prompt], structured_outputs=StructuredOutputsParams(regex="[a-d]{6}[0-9]{3}")
    )
    text = output.outputs[0].text
    assert len(text) == 9 and text[:6].isalpha() and text[6:].isdigit()
    running.compare(prompt, output, temperature=1.0)


def test_prompt_logprobs_do_not_disturb_the_rows(running, fresh):
    (prompt,) = seeded_prompts(32, [70])
    running.check([prompt])
    (output,) = running.check([prompt], prompt_logprobs=1)
    assert len(output.prompt_logprobs) == 70


def test_aborted_request_leaves_the_next_ones_right(running, fresh):
    from vllm import SamplingParams

    llm_engine = running.llm.llm_engine
    prompts = seeded_prompts(33, [70, 30, 50])
    ids = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=30)
        ids.append(llm_engine.add_request(f"abort-{number}", {"prompt_token_ids": prompt}, params))
    done = {}
    for step in range(60):
        done |= {o.request_id: o for o in llm_engine.step() if o.finished}
        if step == 8:
            llm_engine.abort_request(["abort-1"])
    assert sorted(done) == ["abort-0", "abort-2"]
    for number in (0, 2):
        running.compare(prompts[number], done[f"abort-{number}"])
    running.check(prompts)


def test_rows_after_other_weights_were_loaded_are_those_of_the_new(running, fresh, oracles, models):
    prompts, old = seeded_prompts(38, [40, 17, 80]), running.oracle
    before = running.check(prompts)
    running.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(models("moe-other"))})
    assert running.llm.reset_prefix_cache()
    running.oracle = oracles("moe-other")
    cold = running.check(prompts)
    warm = running.check(prompts)
    assert sum(output.num_cached_tokens for output in warm) > 0
    for one, other in zip(before, cold, strict=True):
        ids = [np.sort(output.prompt_routed_experts, -1) for output in (one, other)]
        assert (ids[0] != ids[1]).any(-1).mean() > 0.5
    running.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(models("moe"))})
    assert running.llm.reset_prefix_cache()
    running.oracle = old
    running.check(prompts)


def bend_norms(model) -> None:
    """Other weights: what the routers see changes channel by channel."""
    for name, weight in model.named_parameters():
        if "post_attention_layernorm" in name:
            weight.data *= 1 + 0.9 * torch.cos(torch.arange(len(weight)))


def bend_norms_of_worker(worker) -> None:
    bend_norms(worker.get_model())


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_weights_that_change_in_a_request_leave_rows_of_those_that_led_to_its_tokens(
    running, fresh, models, num_tokens
):
    """Two chunks of 40 before the change, or the whole prompt and a few tokens."""
    from vllm import SamplingParams

    (prompt,) = seeded_prompts(41, [100])
    llm = running.llm
    params = SamplingParams(temperature=0.0, max_tokens=8)
    llm.llm_engine.add_request("bent", {"prompt_token_ids": prompt}, params)
    for _ in range(2 + num_tokens):
        llm.llm_engine.step()
    request = next(iter(running.scheduler.requests.values()))
    assert (request.num_computed_tokens >= 80, request.num_output_tokens) == (True, num_tokens)
    llm.collective_rpc(bend_norms_of_worker)
    assert llm.reset_prefix_cache(reset_running_requests=True)
    (output,) = [o for _ in range(20) for o in llm.llm_engine.step() if o.finished]
    llm.collective_rpc("reload_weights")
    choice = output.outputs[0]
    tokens = [*prompt, *choice.token_ids]
    rows = np.concatenate([output.prompt_routed_experts, choice.routed_experts])
    bent = Oracle(str(models("moe")))
    bend_norms(bent.model)
    num_old = 100 + num_tokens - 1 if num_tokens else 0
    truths = [running.oracle.truth(tokens), bent.truth(tokens)]
    old, new = (np.sort(truth.rows, axis=-1) for truth in truths)
    assert (old != new).any(axis=(1, 2)).mean() > 0.9
    expected = np.concatenate([old[:num_old], new[num_old:]])
    assert np.array_equal(np.sort(rows, axis=-1), expected)
    for i in range(100, len(tokens)):
        logits = truths[i >= 100 + num_tokens].logits[i - 1]
        assert logits.max() - logits[tokens[i]] < 2e-4


def metrics(running):
    names = ("rows_stored", "rows_returned", "bytes_returned", "invalid_reads")
    return {name: running.metric(f"vllm:routed_experts_{name}") for name in names}


def test_metrics_count_rows_and_bytes(running, fresh):
    (prompt,) = seeded_prompts(39, [32])
    before = metrics(running)
    running.check([prompt], max_tokens=16)
    running.check([prompt], max_tokens=16, routed_experts_prompt_start=30)
    running.generate([prompt], max_tokens=16, return_routed_experts=False)
    counted = {name: value - before[name] for name, value in metrics(running).items()}
    # forwarded: 47 tokens cold, 31 after a hit of one block, twice
    assert counted == {
        "rows_stored": 47 + 31 + 31,
        "rows_returned": 47 + 17,
        "bytes_returned": (47 + 17) * 4 * 4,
        "invalid_reads": 0,
    }
    assert running.metric("vllm:routed_experts_table_bytes") > 0


def test_row_that_was_lost_fails_its_request_and_no_other(running, fresh, monkeypatch):
    """The store loses the first token's row of every step with more than one token."""
    table = running.scheduler.routed_experts_manager.table
    write, before = table.write, metrics(running)["invalid_reads"]

    def lossy(step_rows, step):
        slots = step_rows.slots.copy()
        slots[0] = -1 if len(slots) > 1 else slots[0]
        return write(type(step_rows)(slots, step_rows.rows), step)

    (prompt,) = seeded_prompts(40, [20])
    with monkeypatch.context() as patch:
        patch.setattr(table, "write", lossy)
        (failed,) = running.generate([prompt])
    choice = failed.outputs[0]
    assert choice.finish_reason == "error"
    assert "expected routed experts of tokens [0, 35), token 0 has none" in choice.stop_reason
    assert failed.prompt_routed_experts is None and choice.routed_experts is None
    assert metrics(running)["invalid_reads"] == before + 1
    assert running.llm.reset_prefix_cache()
    running.check([prompt])


def test_ten_thousand_short_prompts_do_not_grow_memory(running, fresh):
    import psutil

    def resident_mib() -> float:
        process = psutil.Process()
        family = [process, *process.children(recursive=True)]
        return sum(p.memory_info().rss for p in family) / 2**20

    rng = np.random.default_rng(35)
    sizes = []
    for _ in range(5):
        prompts = [rng.integers(0, END, 3 + i % 4).tolist() for i in range(2000)]
        outputs = running.generate(prompts, max_tokens=2)
        running.compare(prompts[-1], outputs[-1])
        del outputs
        sizes.append(resident_mib())
    assert sizes[-1] - sizes[1] < 30, sizes
