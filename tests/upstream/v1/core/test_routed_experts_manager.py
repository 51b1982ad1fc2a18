# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The life of a request in vLLM's own scheduler and KV-cache manager, without a model.

`Engine.assert_rows` compares an answer with the rows that led to its tokens. Every test also
shows that what its name says has happened: a hit, a preemption, a rejected draft, a block
with a new owner.
"""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from scheduling import (
    BLOCK_SIZE,
    EOS,
    FULL,
    REJECTED,
    SLIDING,
    Engine,
    make_engine,
    next_token,
)
from vllm.v1.core.sched.output import SchedulerOutput

MakeEngine = Callable[..., Engine]
PROMPT = list(range(10, 21))


@pytest.fixture
def make(model: str) -> MakeEngine:
    """Build an engine with so many blocks for requests."""
    return partial(make_engine, model)


def num_hits(engine: Engine, request_id: str) -> int:
    """Tokens that a request found in the prefix cache when it was first scheduled."""
    for step in engine.steps:
        for new in step.scheduled_new_reqs:
            if new.req_id == request_id:
                return new.num_computed_tokens
    raise AssertionError(f"{request_id} was never scheduled")


def chunks(engine: Engine, request_id: str) -> list[int]:
    """Tokens of a request in each step that it was part of."""
    counts = [step.num_scheduled_tokens.get(request_id) for step in engine.steps]
    return [count for count in counts if count]


# A plain life.


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_a_cold_request_returns_a_row_for_each_token_but_the_last(
    make: MakeEngine, is_async: bool, num_prompt: int, max_tokens: int
):
    engine = make(32, is_async=is_async)
    engine.add("a", PROMPT[:num_prompt], max_tokens=max_tokens)
    engine.run()
    assert len(engine.answers["a"].token_ids) == max_tokens
    assert len(engine.answers["a"].rows) == num_prompt + max_tokens - 1
    engine.assert_rows("a")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("stop", ["eos", "token id", "length of the model"])
def test_every_way_to_finish_in_the_engine_returns_rows(
    make: MakeEngine, is_async: bool, stop: str
):
    engine = make(64, is_async=is_async)
    params = {"max_tokens": 500}
    if stop == "eos":
        engine.runner.sample = lambda ids: EOS if len(ids) == 15 else next_token(ids)
    elif stop == "token id":
        params["stop_token_ids"] = [777]
        engine.runner.sample = lambda ids: 777 if len(ids) == 15 else next_token(ids)
    engine.add("a", PROMPT, **params)
    engine.run()
    expected = ("length", 128 - 11) if stop == "length of the model" else ("stop", 5)
    answer = engine.answers["a"]
    assert (answer.finish_reason, len(answer.token_ids)) == expected
    engine.assert_rows("a")


@pytest.mark.parametrize("start", [0, 1, 4, 10, 11])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_prompt_rows_before_the_start_are_left_out(
    make: MakeEngine, start: int, max_tokens: int
):
    engine = make(32)
    engine.add("a", PROMPT, max_tokens=max_tokens, routed_experts_prompt_start=start)
    engine.run()
    assert engine.answers["a"].rows.shape == (11 + max_tokens - 1 - start, 3, 4)
    engine.assert_rows("a", start)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_with_a_stop_string_gets_its_rows_once_when_it_ends(
    make: MakeEngine, is_async: bool
):
    # A stop string ends it in the front end, which then asks for the rows.
    engine = make(14, is_async=is_async)
    for i in range(4):
        engine.add(f"r{i}", [40 + i] * 9, max_tokens=20, stop=["never"])
    for _ in range(30):
        engine.step()
        assert all(
            a.rows is None for a in engine.answers.values() if not a.finish_reason
        )
    stopped = [r for r, a in engine.answers.items() if not a.finish_reason]
    assert any(engine.num_preemptions(request_id) for request_id in stopped)
    engine.abort_and_answer(*stopped)
    engine.assert_all_rows()


def test_a_request_that_wants_no_rows_gets_none_and_its_neighbour_does(
    make: MakeEngine,
):
    engine = make(32)
    engine.add("without", PROMPT, return_routed_experts=False, stop=["x"])
    engine.add("with", PROMPT, return_routed_experts=True)
    engine.run()
    assert engine.answers["without"].rows is None
    assert len(engine.answers["without"].token_ids) == 8
    engine.assert_rows("with")


def test_a_prompt_of_a_request_that_wanted_no_rows_is_a_hit_with_rows(make: MakeEngine):
    engine = make(32)
    engine.add("without", PROMPT, return_routed_experts=False)
    engine.run()
    engine.add("with", PROMPT)
    engine.run()
    assert num_hits(engine, "with") == 8
    engine.assert_rows("with")


# Prefix cache.


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("shared", "hits"), [(3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (12, 8), (13, 12)]
)
def test_a_prefix_hit_returns_the_rows_of_the_pass_that_filled_the_block(
    make: MakeEngine, is_async: bool, shared: int, hits: int
):
    engine = make(32, is_async=is_async)
    prompt = list(range(10, 10 + shared))
    engine.add("first", prompt, max_tokens=5)
    engine.run()
    tail = [] if shared in (11, 12, 13) else [900, 901]
    engine.add("second", prompt + tail, max_tokens=5)
    engine.run()
    # A prompt that is cached to its last token computes its last block again.
    assert num_hits(engine, "second") == hits
    assert (engine.answers["second"].rows[:hits, 0, 3] == 1).all()
    engine.assert_rows("second")


def test_a_hit_on_generated_tokens_returns_their_rows(make: MakeEngine):
    engine = make(32)
    engine.add("turn 1", PROMPT, max_tokens=8)
    engine.run()
    so_far = PROMPT + engine.answers["turn 1"].token_ids
    engine.add(
        "turn 2", [*so_far, 900, 901], routed_experts_prompt_start=len(so_far) - 1
    )
    engine.run()
    assert num_hits(engine, "turn 2") == 16
    engine.assert_rows("turn 2", start=len(so_far) - 1)
    # What the caller holds of turn 1's full blocks is what turn 2 would have returned.
    np.testing.assert_array_equal(
        engine.answers["turn 1"].rows[:16], engine.expected("turn 2")[:16]
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_a_hit_on_blocks_that_the_same_step_fills_returns_rows(
    make: MakeEngine, is_async: bool
):
    engine = make(64, is_async=is_async)
    for i in range(4):
        engine.add(f"r{i}", [*PROMPT, 900 + i], max_tokens=3)
    engine.run()
    assert [num_hits(engine, f"r{i}") for i in range(4)] == [0, 8, 8, 8]
    assert chunks(engine, "r3")[0] == 4
    engine.assert_all_rows()


def test_a_block_evicted_from_the_prefix_cache_is_computed_and_read_anew(
    make: MakeEngine,
):
    engine = make(6)
    engine.add("first", PROMPT, max_tokens=2)
    engine.run()
    engine.add("evicts", list(range(500, 522)), max_tokens=1)
    engine.run()
    engine.add("again", PROMPT, max_tokens=2)
    engine.run()
    assert num_hits(engine, "again") == 0
    assert (engine.answers["again"].rows[:11, 0, 3] == engine.runner.step - 1).all()
    engine.assert_rows("again")


def test_after_a_reset_of_the_prefix_cache_rows_are_those_of_the_new_pass(
    make: MakeEngine,
):
    engine = make(32)
    engine.add("before", PROMPT, max_tokens=2)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("after", PROMPT, max_tokens=2)
    engine.run()
    assert num_hits(engine, "after") == 0
    assert (engine.answers["after"].rows[:, 0, 3] > 2).all()
    engine.assert_rows("after")


# Chunked prefill.


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("budget", [16, 17, 18, 19, 20])
def test_chunks_that_end_inside_and_at_the_edge_of_blocks_lose_no_row(
    make: MakeEngine, is_async: bool, budget: int
):
    engine = make(64, is_async=is_async, max_num_batched_tokens=budget)
    engine.add("a", list(range(10, 55)), max_tokens=4)
    engine.add("b", list(range(110, 151)), max_tokens=4)
    engine.run()
    assert chunks(engine, "a")[:2] == [budget, budget]
    assert len({count % BLOCK_SIZE for count in chunks(engine, "b")}) > 1
    engine.assert_all_rows()


# Preemption: the first pass wins.


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    ("num_blocks", "max_tokens", "times"), [(17, 20, 1), (14, 30, 2)]
)
def test_rows_after_preemptions_are_those_of_the_first_pass(
    make: MakeEngine,
    is_async: bool,
    policy: str,
    num_blocks: int,
    max_tokens: int,
    times: int,
):
    engine = make(num_blocks, is_async=is_async, policy=policy)
    # Together they need more blocks than there are.
    for i in range(4):
        engine.add(f"r{i}", [40 + i] * (9 + i), max_tokens=max_tokens)
    engine.run()
    preempted = [f"r{i}" for i in range(4) if engine.num_preemptions(f"r{i}")]
    assert max(engine.num_preemptions(request_id) for request_id in preempted) >= times
    engine.assert_all_rows()
    engine.assert_nothing_is_kept()
    # It was computed again, in chunks that start anew.
    for request_id in preempted:
        assert sum(chunks(engine, request_id)) > len(engine.answers[request_id].rows)


def steps_of(engine: Engine, request_id: str) -> list[int]:
    """Step in which each row of an answer was computed."""
    return engine.answers[request_id].rows[:, 0, 3].tolist()


def test_a_prompt_preempted_between_its_chunks_has_rows_of_the_pass_that_finished_it(
    make: MakeEngine,
):
    engine = make(9, max_num_batched_tokens=16)
    engine.add("grows", list(range(500, 511)), max_tokens=14)
    engine.step()
    engine.add("victim", list(range(10, 32)), max_tokens=2)
    engine.run()
    assert engine.num_preemptions("victim") == 1
    # Three full blocks of the first chunk are still cached when it resumes; the rest of
    # the first chunk led to nothing.
    assert chunks(engine, "victim")[:2] == [15, 22 - 12]
    first, resumed = steps_of(engine, "victim")[0], steps_of(engine, "victim")[12]
    assert first < resumed
    assert steps_of(engine, "victim")[:22] == [first] * 12 + [resumed] * 10
    engine.assert_all_rows()


def test_a_request_preempted_while_it_is_computed_again_keeps_the_rows_of_its_tokens(
    make: MakeEngine,
):
    engine = make(64, is_async=True, max_num_batched_tokens=16)
    engine.add("a", list(range(10, 55)), max_tokens=9)
    for _ in range(5):
        engine.step()
    engine.drain()
    held = engine.expected("a")
    assert len(held) == 45 + 3 - 1
    for _ in range(2):
        engine.reset()
        engine.step()
        engine.step()
        assert engine.scheduler.requests["a"].num_computed_tokens == 32
    engine.reset()
    engine.run()
    assert chunks(engine, "a")[5:] == [16, 16] * 2 + [16] * 3 + [1] * 5
    np.testing.assert_array_equal(engine.answers["a"].rows[: len(held)], held)
    engine.assert_rows("a")


def preempt_in_flight(engine: Engine, request_id: str) -> SchedulerOutput:
    """Launch steps until one preempts a request whose last step is not collected yet."""
    for _ in range(60):
        before = engine.in_flight[-1][0] if engine.in_flight else None
        launched = engine.launch()
        if request_id in launched.preempted_req_ids:
            assert before is not None and request_id in before.num_scheduled_tokens
            return launched
        if len(engine.in_flight) > 1:
            engine.collect()
    raise AssertionError(f"{request_id} was never preempted")


def test_a_row_in_flight_at_the_preemption_is_kept_and_not_given_to_its_new_owner(
    make: MakeEngine,
):
    engine = make(8, is_async=True)
    engine.add("grows", [1] * 9, max_tokens=20)
    engine.add("victim", [2] * 9, max_tokens=8)
    preempt_in_flight(engine, "victim")
    in_flight = engine.runner.step - 1
    assert engine.runner.blocks("victim") & engine.runner.blocks("grows")
    engine.run()
    engine.assert_all_rows()
    assert in_flight in steps_of(engine, "victim")


def test_a_request_that_finishes_in_flight_after_its_preemption_returns_rows(
    make: MakeEngine,
):
    engine = make(6, is_async=True)
    engine.add("grows", [1] * 12, max_tokens=9)
    engine.add("victim", [2] * 9, max_tokens=1)
    preempt_in_flight(engine, "victim")
    engine.drain()
    assert engine.answers["victim"].finish_reason == "length"
    engine.assert_rows("victim")


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_rows_of_a_hit_that_the_lost_step_itself_filled_are_those_of_the_first_pass(
    make: MakeEngine, max_tokens: int
):
    # "hits" shares the blocks that "fills" computes in the same step. In the next step the
    # six others cross a block's edge: both lose their blocks, which get a new owner at once.
    engine = make(10, is_async=True)
    for i in range(6):
        engine.add(f"r{i}", [30 + i, 1, 2], max_tokens=12)
    engine.step()
    engine.add("fills", PROMPT[:8], max_tokens=4)
    engine.add("hits", [*PROMPT[:8], 900], max_tokens=max_tokens)
    engine.step()
    assert num_hits(engine, "hits") == 8
    lost = engine.runner.blocks("fills")
    engine.step()
    assert {"fills", "hits"} <= engine.steps[-1].preempted_req_ids
    assert lost <= set().union(*(engine.runner.blocks(f"r{i}") for i in range(6)))
    engine.run()
    engine.assert_all_rows()


def test_a_block_got_in_the_schedule_that_preempts_brings_no_row_of_its_former_owner(
    make: MakeEngine,
):
    engine = make(14, is_async=True, policy="priority")
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 16
    engine.scheduler.scheduler_reserve_full_isl = False
    engine.add("victim", list(range(10, 50)), max_tokens=2, priority=9)
    engine.step()
    engine.add("urgent", [4] * 32, max_tokens=2, priority=0)
    engine.add("gone", [3] * 5, max_tokens=9, priority=9)
    engine.launch()
    assert engine.steps[-1].num_scheduled_tokens == {
        "victim": 16,
        "urgent": 16,
        "gone": 5,
    }
    engine.collect()
    # All 14 blocks are taken. "gone" goes while step 2 is in flight, and "victim" gets its
    # two blocks for a last chunk in step 3, whose schedule gives them to "urgent".
    engine.abort("gone")
    got: list[int] = []
    preempt_request = engine.scheduler._preempt_request

    def spy(request, timestamp):
        manager = engine.scheduler.kv_cache_manager
        got.extend(manager.get_block_ids(request.request_id)[0])
        preempt_request(request, timestamp)

    engine.scheduler._preempt_request = spy
    engine.launch()
    assert engine.steps[-1].preempted_req_ids == {"victim"}
    assert len(got) == 10 and set(got[8:]) == engine.runner.blocks("gone")
    engine.run()
    engine.assert_rows("victim")
    engine.assert_rows("urgent")


# Speculative decoding.


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_right", [0, 1, 2, 3, None])
def test_rejected_drafts_leave_nothing(
    make: MakeEngine, is_async: bool, num_right: int | None
):
    engine = make(64, is_async=is_async, num_drafts=3)
    # None: another number in each step of each request.
    engine.runner.num_accepted = lambda request_id, step: (
        (step * 7 + ord(request_id)) % 4 if num_right is None else num_right
    )
    for i, request_id in enumerate("abcd"):
        engine.add(request_id, [50 + i] * (3 + i), max_tokens=14 + i)
    engine.run()
    assert any(step.scheduled_spec_decode_tokens for step in engine.steps)
    if num_right != 3:
        # Rejected drafts did reach the KV cache.
        assert any(row[0, 0] == REJECTED for row in engine.runner.kv_cache.values())
    for answer in engine.answers.values():
        assert REJECTED not in answer.rows
    engine.assert_all_rows()


def test_drafts_in_flight_at_the_preemption_are_kept_as_far_as_they_were_right(
    make: MakeEngine,
):
    engine = make(9, is_async=True, num_drafts=3)
    engine.runner.num_accepted = lambda request_id, step: 1
    engine.add("grows", [1] * 9, max_tokens=20)
    engine.add("victim", [2] * 9, max_tokens=12)
    preempt_in_flight(engine, "victim")
    in_flight = engine.runner.step - 1
    engine.run()
    engine.assert_rows("victim")
    # The token itself and the one draft of three that was right.
    assert (engine.answers["victim"].rows[:, 0, 3] == in_flight).sum() == 2


def test_a_prefix_hit_after_rejected_drafts_returns_no_draft(make: MakeEngine):
    engine = make(64, num_drafts=3)
    engine.runner.num_accepted = lambda request_id, step: step % 2
    engine.add("first", PROMPT, max_tokens=13)
    engine.run()
    engine.add(
        "second", [*PROMPT, *engine.answers["first"].token_ids, 900], max_tokens=2
    )
    engine.run()
    assert num_hits(engine, "second") > 11
    engine.assert_rows("second")


def test_rows_that_come_after_their_request_was_aborted_do_not_reach_the_next_owner(
    make: MakeEngine,
):
    engine = make(3, is_async=True)
    engine.add("gone", [1] * 9, max_tokens=8)
    engine.launch()
    engine.abort("gone")
    engine.add("next", [2] * 9, max_tokens=2)
    engine.launch()
    assert engine.runner.blocks("next") & engine.runner.blocks("gone")
    engine.run()
    assert engine.answers["gone"].rows is None
    engine.assert_rows("next")


# Forced reset of the prefix cache, as weight updates do it.


@pytest.mark.parametrize("is_async", [False, True])
def test_a_forced_reset_in_a_drained_engine_loses_no_token_and_no_row(
    make: MakeEngine, is_async: bool
):
    engine = make(64, is_async=is_async)
    engine.add("a", PROMPT, max_tokens=8)
    engine.add("b", PROMPT[:3], max_tokens=8)
    for _ in range(3):
        engine.step()
    engine.drain()
    held = engine.expected("a")
    engine.reset()
    engine.run()
    for request_id in "ab":
        answer = engine.answers[request_id]
        assert answer.prompt + answer.token_ids == engine.runner.tokens[request_id]
        engine.assert_rows(request_id)
    # First pass: what the caller holds was chosen by the weights before the reset.
    np.testing.assert_array_equal(engine.answers["a"].rows[: len(held)], held)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_forced_reset_with_a_step_in_flight_returns_rows_of_the_tokens_returned(
    make: MakeEngine, num_drafts: int
):
    engine = make(64, is_async=True, num_drafts=num_drafts)
    engine.runner.num_accepted = lambda request_id, step: step % 3
    engine.add("a", PROMPT, max_tokens=14)
    for _ in range(4):
        engine.step()
    ((scheduled, *_),) = engine.in_flight
    assert bool(scheduled.scheduled_spec_decode_tokens) == bool(num_drafts)
    engine.reset()
    engine.run()
    assert len(engine.answers["a"].token_ids) == 14
    engine.assert_rows("a")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_resets", [1, 2, 3])
def test_a_prompt_reset_between_its_chunks_has_no_row_of_a_pass_that_was_given_up(
    make: MakeEngine, is_async: bool, num_resets: int
):
    engine = make(64, is_async=is_async, max_num_batched_tokens=32)
    engine.add("a", list(range(10, 110)), max_tokens=4)
    for _ in range(num_resets):
        engine.step()
        engine.step()
        assert chunks(engine, "a")[-2:] == [32, 32]
        engine.reset()
    given_up = engine.runner.step
    engine.run()
    answer = engine.answers["a"]
    assert answer.prompt + answer.token_ids == engine.runner.tokens["a"]
    assert min(steps_of(engine, "a")) > given_up
    engine.assert_rows("a")


def test_a_first_token_in_flight_at_a_forced_reset_is_discarded_with_its_rows(
    make: MakeEngine,
):
    engine = make(64, is_async=True, max_num_batched_tokens=16)
    engine.add("a", list(range(10, 55)), max_tokens=4)
    for _ in range(3):
        engine.step()
    assert chunks(engine, "a") == [16, 16, 13] and len(engine.in_flight) == 1
    engine.reset()
    engine.run()
    assert min(steps_of(engine, "a")) > 3
    engine.assert_rows("a")


def test_a_first_token_in_flight_at_a_preemption_is_kept_with_all_its_rows(
    make: MakeEngine,
):
    engine = make(15, is_async=True, max_num_batched_tokens=16)
    engine.add("grows", [1] * 13, max_tokens=30)
    engine.step()
    engine.add("victim", list(range(10, 52)), max_tokens=9)
    preempt_in_flight(engine, "victim")
    assert chunks(engine, "victim") == [15, 15, 12]
    assert engine.answers["victim"].token_ids == []
    at = engine.runner.step
    engine.run()
    assert max(steps_of(engine, "victim")[:42]) < at
    engine.assert_rows("victim")


# Aborts that are answered.


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_steps", [2, 3, 6])
@pytest.mark.parametrize("stop", [None, ["never"]])
def test_an_aborted_request_has_rows_for_the_tokens_it_has_returned(
    make: MakeEngine, is_async: bool, num_steps: int, stop: list[str] | None
):
    engine = make(32, is_async=is_async)
    engine.add("a", PROMPT, max_tokens=50, stop=stop)
    for _ in range(num_steps):
        engine.step()
    engine.abort_and_answer("a")
    assert engine.answers["a"].finish_reason == "abort"
    assert len(engine.answers["a"].token_ids) == num_steps - is_async
    engine.assert_rows("a")
    # A step in flight comes back for nobody.
    engine.run()


def test_a_request_aborted_before_its_first_token_or_without_rows_has_none(
    make: MakeEngine,
):
    engine = make(32, is_async=True, max_num_batched_tokens=16)
    engine.add("without", PROMPT, max_tokens=50, return_routed_experts=False)
    engine.add("a", list(range(10, 55)), max_tokens=50)
    engine.add("waiting", PROMPT)
    for _ in range(3):
        engine.step()
    assert [len(a.token_ids) for a in engine.answers.values()] == [2, 0, 0]
    engine.abort_and_answer()
    for answer in engine.answers.values():
        assert (answer.rows, answer.error) == (None, None)


def test_a_request_aborted_while_it_is_preempted_has_its_rows(make: MakeEngine):
    engine = make(8, is_async=True)
    engine.add("grows", [1] * 9, max_tokens=20)
    engine.add("victim", [2] * 9, max_tokens=20)
    preempt_in_flight(engine, "victim")
    engine.collect()
    assert engine.scheduler.requests["victim"].num_computed_tokens == 0
    engine.abort_and_answer("victim")
    engine.assert_rows("victim")


# A row that is missing.


def test_a_missing_row_fails_its_request_alone_and_says_which_row(make: MakeEngine):
    engine = make(32)
    engine.runner.loses = lambda request_id, position, step: (
        (request_id, position) == ("a", 7)
    )
    engine.add("a", PROMPT, max_tokens=3)
    engine.add("b", PROMPT[1:], max_tokens=3)
    engine.run()
    answer = engine.answers["a"]
    assert answer.finish_reason == "error"
    assert answer.error == (
        "request a: expected routed experts of tokens [0, 13), token 7 has none "
        "(prompt 11, generated 3)"
    )
    assert answer.rows is None
    assert not engine.scheduler.requests
    engine.assert_rows("b")


def test_a_hit_on_a_block_with_a_missing_row_fails_rather_than_returns_it(
    make: MakeEngine,
):
    engine = make(32)
    engine.runner.loses = lambda request_id, position, step: (
        (request_id, position) == ("a", 2)
    )
    engine.add("a", PROMPT, max_tokens=2)
    engine.run()
    engine.add("b", PROMPT, max_tokens=2)
    engine.run()
    assert num_hits(engine, "b") == 8
    assert re.search(r"token 2 has none", engine.answers["b"].error)


def test_steps_without_rows_fail_requests_instead_of_returning_zeros(make: MakeEngine):
    engine = make(32)
    execute = engine.runner.execute

    def execute_without_rows(scheduled: SchedulerOutput):
        output = execute(scheduled)
        output.routed_experts = None
        return output

    engine.runner.execute = execute_without_rows
    engine.add("a", PROMPT, max_tokens=2)
    engine.run()
    assert engine.answers["a"].finish_reason == "error"
    assert "token 0 has none" in engine.answers["a"].error


def test_a_missing_row_of_an_aborted_request_is_reported_beside_the_others_rows(
    make: MakeEngine,
):
    engine = make(32)
    # That of the last token, which was never forwarded, is not missed.
    engine.runner.loses = lambda request_id, position, step: (
        (request_id, position) in [("a", 9), ("b", 12)]
    )
    engine.add("a", PROMPT, max_tokens=9)
    engine.add("b", PROMPT[1:], max_tokens=9)
    for _ in range(3):
        engine.step()
    engine.abort_and_answer("a", "b", "unknown")
    engine.assert_rows("b")
    assert engine.answers["a"].rows is None
    assert engine.answers["a"].error == (
        "request a: expected routed experts of tokens [0, 13), token 9 has none "
        "(prompt 11, generated 3)"
    )


# Metrics.


def test_stats_count_rows_stored_and_returned_since_the_last_call(make: MakeEngine):
    engine = make(32, log_stats=False)
    engine.add("a", PROMPT, max_tokens=4)
    engine.add("b", PROMPT[:2], max_tokens=4, return_routed_experts=False)
    engine.run()
    stats = engine.scheduler.routed_experts_manager.take_stats()
    assert stats.num_rows_stored == (11 + 3) + (2 + 3)
    assert stats.num_rows_returned == 11 + 3
    assert stats.num_bytes_returned == (11 + 3) * 3 * 4 * 2
    assert stats.num_invalid_reads == 0
    assert stats.table_bytes == engine.table.nbytes
    stats = engine.scheduler.routed_experts_manager.take_stats()
    assert (stats.num_rows_stored, stats.num_rows_returned) == (0, 0)
    assert stats.table_bytes == engine.table.nbytes


def test_stats_reach_the_scheduler_s_stats_with_each_request_that_a_missing_row_failed(
    make: MakeEngine,
):
    engine = make(32)
    engine.runner.loses = lambda request_id, position, step: position == 1
    engine.add("a", [1, 2, 3], max_tokens=1)
    engine.add("b", [4, 5, 6], max_tokens=1)
    scheduled = engine.scheduler.schedule()
    outputs = engine.scheduler.update_from_output(
        scheduled, engine.runner.execute(scheduled)
    )
    stats = outputs[0].scheduler_stats.routed_experts_stats
    assert (stats.num_rows_stored, stats.num_invalid_reads) == (4, 2)


# Which slots.


def test_rows_of_a_hybrid_model_go_by_the_slots_of_its_full_attention_group(
    make: MakeEngine,
):
    engine = make(40, [SLIDING, FULL], group=1)
    for i in range(6):
        engine.add(f"r{i}", [*range(10, 30), 40 + i], max_tokens=10)
    engine.run()
    # Blocks of both groups come from one pool, of which the table has every slot.
    assert engine.table.shape[0] == 41 * BLOCK_SIZE
    engine.assert_all_rows()


def test_a_model_without_full_attention_is_refused(make: MakeEngine):
    message = (
        "--enable-return-routed-experts: expected a KV-cache group of full attention, "
        "found SlidingWindowSpec"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(8, [SLIDING])


def test_without_the_flag_the_scheduler_keeps_nothing(make: MakeEngine):
    engine = make(32, returns_rows=False)
    engine.add("a", PROMPT, max_tokens=2, stop=["never"])
    engine.run()
    engine.add("b", PROMPT, max_tokens=9)
    engine.step()
    engine.abort_and_answer()
    assert [str(a.finish_reason) for a in engine.answers.values()] == [
        "length",
        "abort",
    ]
    assert all(answer.rows is None for answer in engine.answers.values())
    assert all(step.routed_experts_step == 0 for step in engine.steps)
