# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests that the server ends early and still answers, from the engine core outwards."""

import asyncio
import queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scheduling import BLOCK_SIZE, Engine, make_engine
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

PROMPT = list(range(10, 21))


class Core(EngineCoreProc):
    """An engine core of a scheduler and an output queue, without a process."""

    def __init__(self, engine: Engine):
        self.scheduler = engine.scheduler
        self.output_queue = queue.Queue()

    def answers(self) -> dict[str, EngineCoreOutput]:
        """Everything that was sent, by request; nobody is answered twice."""
        answers: dict[str, EngineCoreOutput] = {}
        while not self.output_queue.empty():
            _, outputs = self.output_queue.get()
            assert set(outputs.finished_requests) == {o.request_id for o in outputs.outputs}
            for output in outputs.outputs:
                assert output.request_id not in answers
                answers[output.request_id] = output
        return answers


@pytest.fixture
def engine(model: str) -> Engine:
    """An asynchronous engine with three requests that have tokens and one that waits."""
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    config = KVCacheConfig(65, [], [KVCacheGroupSpec(["full"], spec)])
    engine = make_engine(model, config, is_async=True)
    engine.add("plain", PROMPT, max_tokens=50)
    engine.add("stops", PROMPT[1:], max_tokens=50, stop=["never"])
    engine.add("without", PROMPT[2:], max_tokens=50, return_routed_experts=False)
    for _ in range(4):
        engine.step()
    engine.add("waits", PROMPT[3:], max_tokens=50)
    return engine


def test_an_abort_of_all_answers_all_with_the_rows_that_are_still_to_come(engine: Engine):
    core = Core(engine)
    core.abort_and_answer()
    answers = core.answers()
    assert set(answers) == {"plain", "stops", "without", "waits"}
    assert all(output.finish_reason == FinishReason.ABORT for output in answers.values())
    assert all(output.new_token_ids == [] for output in answers.values())
    assert all(output.error is None for output in answers.values())
    np.testing.assert_array_equal(answers["plain"].routed_experts, engine.expected("plain"))
    assert len(answers["stops"].routed_experts) == 0
    assert answers["without"].routed_experts is None
    assert answers["waits"].routed_experts is None
    assert not engine.scheduler.requests
    # The step in flight comes back for nobody.
    engine.drain()
    for request_id in ("plain", "stops", "without"):
        assert len(engine.answers[request_id].token_ids) == 3


def test_an_abort_of_some_leaves_the_others_alone(engine: Engine):
    core = Core(engine)
    core.abort_and_answer(["plain", "unknown"])
    assert set(core.answers()) == {"plain"}
    assert set(engine.scheduler.requests) == {"stops", "without", "waits"}
    engine.run()
    engine.assert_rows("stops")
    engine.assert_rows("waits")


def test_an_abort_without_a_full_set_of_rows_says_what_is_missing(engine: Engine):
    engine.table._is_valid[:] = False
    core = Core(engine)
    core.abort_and_answer(["plain", "waits"])
    answers = core.answers()
    assert answers["plain"].routed_experts is None
    assert answers["plain"].error == (
        "request plain: expected routed experts of tokens [0, 13), token 0 has none "
        "(prompt 11, generated 3)"
    )
    assert answers["waits"].error is None


def test_a_paused_engine_that_aborts_answers_with_rows(engine: Engine):
    core = Core(engine)
    core._reset_caches = lambda: None
    core.has_work = lambda: False
    assert core.pause_scheduler("abort", clear_cache=True) is None
    rows = core.answers()["plain"].routed_experts
    np.testing.assert_array_equal(rows, engine.expected("plain"))


def test_without_the_flag_an_abort_answers_as_ever(engine: Engine):
    engine.scheduler.routed_experts_manager = None
    core = Core(engine)
    core.abort_and_answer()
    answers = core.answers()
    assert set(answers) == {"plain", "stops", "without", "waits"}
    assert all(output.routed_experts is None for output in answers.values())


# The front end's half.


class FrontEnd(AsyncLLM):
    """What AsyncLLM.abort() talks to, recording what it says."""

    def __init__(self, awaiting: dict[str, list[str]], *, enabled: bool = True):
        self.said: list[tuple[str, list[str]]] = []
        self.model_config = SimpleNamespace(enable_return_routed_experts=enabled)
        self.log_requests = False
        self.output_processor = SimpleNamespace(
            awaiting_routed_experts=lambda request_id: awaiting.get(request_id, []),
            abort_requests=self._abort_requests,
        )
        self.engine_core = SimpleNamespace(
            abort_and_answer_async=self._tell("answer"),
            abort_requests_async=self._tell("abort"),
        )

    def __del__(self):
        pass

    def _abort_requests(self, request_ids, internal: bool) -> list[str]:
        return [f"internal {request_id}" for request_id in request_ids]

    def _tell(self, what: str):
        async def tell(request_ids):
            if request_ids:
                self.said.append((what, list(request_ids)))

        return tell


@pytest.mark.parametrize("request_ids", ["a", ["a"], ("a",)])
def test_a_request_that_waits_for_rows_is_ended_by_the_engine(request_ids):
    front_end = FrontEnd({"a": ["0_a", "1_a"]})
    asyncio.run(front_end.abort(request_ids))
    assert front_end.said == [("answer", ["0_a", "1_a"])]


def test_a_request_that_wants_no_rows_is_ended_by_the_front_end():
    front_end = FrontEnd({"a": ["0_a"]})
    asyncio.run(front_end.abort(["a", "b"]))
    assert front_end.said == [("answer", ["0_a"]), ("abort", ["internal b"])]


@pytest.mark.parametrize(("enabled", "internal"), [(False, False), (True, True)])
def test_a_client_that_went_away_gets_nothing(enabled: bool, internal: bool):
    front_end = FrontEnd({"a": ["0_a"]}, enabled=enabled)
    asyncio.run(front_end.abort("a", internal=internal))
    assert front_end.said == [("abort", ["internal a"])]


@pytest.mark.parametrize(
    ("request_ids", "is_dead", "calls"),
    [(["a"], False, [("abort_and_answer", ["a"])]), (["a"], True, []), ([], False, [])],
)
def test_a_dead_engine_is_asked_for_nothing(request_ids, is_dead: bool, calls: list):
    made = []

    async def call_utility_async(*args):
        made.append(args)

    client = SimpleNamespace(
        resources=SimpleNamespace(engine_dead=is_dead), call_utility_async=call_utility_async
    )
    asyncio.run(AsyncMPClient.abort_and_answer_async(client, request_ids))
    assert made == calls
