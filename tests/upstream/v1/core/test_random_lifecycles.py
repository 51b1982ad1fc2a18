# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Random requests on too few blocks: every answer is right or the seed says how to see why.

Shared prefixes, chunks, preemption, drafts, stop strings, answered aborts, forced resets and
rows with every token meet here in orders that nobody has thought of.
"""

import random

import numpy as np
import pytest

from scheduling import Engine, make_engine

PREFIXES = [list(range(10 + 50 * k, 34 + 50 * k)) for k in range(3)]


class Life:
    """One engine and a random source that decides what happens to it."""

    def __init__(
        self,
        engine: Engine,
        seed: int,
        *,
        resets: bool = False,
        updates: bool = False,
    ) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.resets, self.updates = resets, updates
        self.num_requests = self.random.randint(6, 14)
        self.aborted: set[str] = set()
        num_drafts = engine.num_drafts
        engine.runner.num_accepted = lambda request_id, step: random.Random(
            f"{seed} {request_id} {step}"
        ).randint(0, num_drafts)

    def run(self) -> None:
        engine = self.engine
        while (
            len(engine.answers) < self.num_requests or engine.scheduler.has_requests()
        ):
            self._add_some()
            if self.random.random() < 0.03:
                self._abort_one()
            if self.updates and self.random.random() < 0.2:
                # With steps in flight, as an engine that is not paused.
                versions = engine.weight_versions
                self.random.choice([versions.note_change, self._set_version])()
            if self.resets and self.random.random() < 0.1:
                # Only the async scheduler knows how to discard a step in flight.
                if not engine.is_async or self.random.random() < 0.5:
                    engine.drain()
                engine.reset()
            if engine.scheduler.has_requests() or engine.in_flight:
                engine.step()
            assert len(engine.steps) < 500, "stuck"
        engine.drain()

    def _set_version(self) -> None:
        self.engine.weight_versions.set(f"v{len(self.engine.steps)}")

    def _add_some(self) -> None:
        if self.random.random() < 0.5:
            return
        for _ in range(self.random.randint(1, 3)):
            number = len(self.engine.answers)
            if number == self.num_requests:
                return
            prefix = self.random.choice(PREFIXES)[: self.random.randint(0, 24)]
            tail = [
                self.random.randint(0, 99) for _ in range(self.random.randint(1, 6))
            ]
            self.engine.add(
                f"r{number}",
                prefix + tail,
                max_tokens=self.random.choice([1, 2, 5, 12]),
                priority=self.random.randint(0, 2),
                routed_experts_stream=["end", "delta"][number % 2],
                stop=["never"] if self.random.random() < 0.3 else None,
            )

    def _abort_one(self) -> None:
        scheduler = self.engine.scheduler
        if not scheduler.requests:
            return
        request_id = self.random.choice(list(scheduler.requests))
        self.aborted.add(request_id)
        self.engine.abort_and_answer(request_id)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"is_async": True},
        {"is_async": True, "policy": "priority"},
        {"num_drafts": 2},
        {"is_async": True, "num_drafts": 3},
        {"depth": 2},
        {"depth": 2, "resets": True},
        {"is_async": True, "resets": True},
        {"is_async": True, "policy": "priority", "resets": True},
        {"is_async": True, "num_drafts": 3, "resets": True},
        {"updates": True},
        {"is_async": True, "policy": "priority", "updates": True},
        {"is_async": True, "num_drafts": 3, "resets": True, "updates": True},
    ],
    ids=lambda kind: "-".join(kind) or "plain",
)
def test_no_life_returns_a_wrong_row(model: str, kind: dict, seed: int):
    kind = dict(kind)
    resets, updates = kind.pop("resets", False), kind.pop("updates", False)
    source = random.Random(seed)
    engine = make_engine(
        model,
        source.choice([12, 13, 15, 19]),
        max_num_batched_tokens=source.choice([16, 17, 33, 64]),
        **kind,
    )
    life = Life(engine, seed, resets=resets, updates=updates)
    life.run()
    for request_id in engine.answers:
        if request_id not in life.aborted:
            engine.assert_tokens(request_id)
        if engine.answers[request_id].token_ids:
            engine.assert_rows(request_id)
    engine.assert_nothing_is_kept()


def test_the_random_lives_do_answer_with_rows_of_several_weights(model: str):
    num_runs = []
    for seed in range(6):
        engine = make_engine(model, 13, is_async=True, num_drafts=3)
        Life(engine, seed, updates=True).run()
        for answer in engine.answers.values():
            num_runs.append(len(answer.versions.runs(0, 1000)))
    assert np.count_nonzero(np.array(num_runs) > 1) > 15


def test_the_random_lives_do_preempt_and_hit(model: str):
    num_preempted = num_hits = 0
    for seed in range(6):
        engine = make_engine(model, 12, is_async=True)
        Life(engine, seed).run()
        num_preempted += sum(len(step.preempted_req_ids or ()) for step in engine.steps)
        new = [n for step in engine.steps for n in step.scheduled_new_reqs]
        num_hits += np.count_nonzero([n.num_computed_tokens for n in new])
    assert num_preempted > 5
    assert num_hits > 5
