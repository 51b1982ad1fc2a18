# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""reset_prefix_cache(reset_running_requests=True) loses and repeats no token."""

import pytest

from scheduling import Engine, make_engine


def start(model: str, num_steps: int, **kwargs) -> Engine:
    engine = make_engine(model, 64, returns_rows=False, **kwargs)
    engine.add("a", list(range(10, 21)), max_tokens=12)
    engine.add("b", [1, 2, 3], max_tokens=12)
    for _ in range(num_steps):
        engine.step()
    return engine


def reset_and_finish(engine: Engine) -> None:
    assert engine.scheduler.running
    engine.reset()
    assert not engine.scheduler.running
    engine.run()
    for request_id in engine.answers:
        engine.assert_tokens(request_id)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_steps", [2, 4])
def test_first_token_after_a_pause_is_kept(model: str, is_async: bool, num_steps: int):
    engine = start(model, num_steps, is_async=is_async)
    # A paused engine has no step in flight, as /pause?mode=keep waits for it.
    engine.drain()
    reset_and_finish(engine)


def test_token_in_flight_is_sampled_again_and_returned_once(model: str):
    engine = start(model, 3, is_async=True)
    assert engine.in_flight
    reset_and_finish(engine)


def test_reset_between_the_chunks_of_a_prompt_loses_no_token(model: str):
    engine = start(model, 0, is_async=True, max_num_batched_tokens=16)
    engine.add("long", list(range(100, 145)), max_tokens=12)
    for _ in range(3):
        engine.step()
    # The step in flight ends before the prompt does and samples nothing.
    assert engine.in_flight
    assert sum(count for _, count in engine.runner.passes["long"]) < 45
    reset_and_finish(engine)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_accepted", [0, 1, 3])
def test_rejected_drafts_of_a_discarded_step_are_not_taken_off(
    model: str, is_async: bool, num_accepted: int
):
    engine = start(model, 0, is_async=is_async, num_drafts=3)
    engine.runner.num_accepted = lambda request_id, step: num_accepted
    for _ in range(3):
        engine.step()
    passes = engine.runner.passes["a"]
    assert passes[-1][1] == 4
    assert bool(engine.in_flight) is is_async
    del passes[:]
    reset_and_finish(engine)
    # What was computed after the reset is not computed once more.
    (first, num_resumed), *others = passes
    assert first == 0
    assert all(start >= num_resumed for start, _ in others)
