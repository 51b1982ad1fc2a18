# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests that the engine does not end by itself are still answered with their rows.

The server aborts them, or a stop string ends them in the front end, which asks for the rows.
"""

import asyncio
import queue
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from scheduling import Engine, make_engine
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import (
    AsyncMPClient,
    DPLBAsyncMPClient,
    InprocClient,
    SyncMPClient,
)
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

PROMPT = list(range(10, 21))


class Core(EngineCoreProc):
    """An engine core of a scheduler and an output queue, without a process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.output_queue = queue.Queue()
        self.vllm_config = SimpleNamespace(shutdown_timeout=0)
        self.shutdown_state = EngineShutdownState.REQUESTED

    def has_work(self) -> bool:
        return False

    def _reset_caches(self, *args, **kwargs) -> None:
        pass

    def take_answers(self) -> None:
        """Hand out what was sent, to requests that have not been answered yet."""
        while not self.output_queue.empty():
            _, outputs = self.output_queue.get()
            for output in outputs.outputs:
                assert output.request_id in outputs.finished_requests
                self.engine.answers[output.request_id].add(output, [])


@pytest.fixture
def engine(model: str) -> Engine:
    """Three requests that have three tokens each, and one that waits."""
    engine = make_engine(model, 64, is_async=True)
    engine.add("a", PROMPT)
    engine.add("b", PROMPT[1:], stop=["never"])
    engine.add("c", PROMPT[2:], return_routed_experts=False)
    for _ in range(4):
        engine.step()
    engine.add("d", PROMPT[3:])
    return engine


@pytest.mark.parametrize(
    "end",
    [
        lambda core: core.abort_and_answer(),
        lambda core: core.pause_scheduler("abort"),
        lambda core: core._handle_shutdown(),
        lambda core: core._handle_client_request(
            EngineCoreRequestType.ABORT_AND_ANSWER, list("dcba")
        ),
    ],
    ids=["all", "pause", "shutdown", "by id"],
)
def test_requests_that_the_engine_ends_early_are_answered_with_rows(
    engine: Engine, end: Callable[[Core], None]
):
    core = Core(engine)
    end(core)
    core.take_answers()
    assert [len(a.token_ids) for a in engine.answers.values()] == [3, 3, 3, 0]
    assert {a.finish_reason for a in engine.answers.values()} == {"abort"}
    assert not engine.scheduler.requests
    for request_id in "ab":
        engine.assert_rows(request_id)
    for request_id in "cd":
        assert engine.answers[request_id].rows is None
        assert engine.answers[request_id].error is None
    # The step in flight comes back for nobody.
    engine.drain()


def test_abort_of_some_leaves_the_others_alone(engine: Engine):
    core = Core(engine)
    core.abort_and_answer(["a", "unknown"])
    core.take_answers()
    assert set(engine.scheduler.requests) == set("bcd")
    engine.run()
    assert [len(a.token_ids) for a in engine.answers.values()] == [3, 8, 8, 8]
    for request_id in "abd":
        engine.assert_rows(request_id)


# From the front end to the engine.


class Sender:
    """Stands in for a client of the engine core: remembers what it sends."""

    def __init__(self, is_dead: bool = False) -> None:
        self.resources = SimpleNamespace(engine_dead=is_dead)
        self.reqs_in_flight = {"a": "engine 0", "b": "engine 1"}
        self.sent: list[tuple] = []

    def send(self, request_type, request_ids, *engine):
        assert request_type == EngineCoreRequestType.ABORT_AND_ANSWER
        self.sent.append((request_ids, *engine))

    async def send_async(self, *args):
        self.send(*args)


@pytest.mark.parametrize(
    ("request_ids", "is_dead", "sent"),
    [(["a"], False, [(["a"],)]), (["a"], True, []), ([], False, [])],
)
def test_a_dead_engine_is_asked_for_nothing(request_ids, is_dead: bool, sent: list):
    client = Sender(is_dead)
    client._send_input = client.send
    SyncMPClient.abort_and_answer(client, request_ids)
    assert client.sent == sent
    client = Sender(is_dead)
    client._send_input = client.send_async
    asyncio.run(AsyncMPClient.abort_and_answer_async(client, request_ids))
    assert client.sent == sent


@pytest.mark.parametrize("is_dead", [False, True])
def test_each_request_is_asked_for_at_the_engine_that_has_it(is_dead: bool):
    client = Sender(is_dead)
    client._send_input = client.send_async
    asyncio.run(
        DPLBAsyncMPClient.abort_and_answer_async(client, ["b", "a", "finished"])
    )
    expected = [(["b"], "engine 1"), (["a"], "engine 0")]
    assert client.sent == ([] if is_dead else expected)


def test_an_engine_in_process_answers_before_its_next_step(engine: Engine):
    client = InprocClient.__new__(InprocClient)
    client.engine_core = SimpleNamespace(
        scheduler=engine.scheduler,
        step_fn=lambda: ({0: "the step"}, True),
        post_step=lambda model_executed: None,
    )
    client.answers = None
    client.abort_and_answer([])
    assert client.get_output() == "the step"
    client.abort_and_answer(["b"])
    (answer,) = client.get_output().outputs
    assert (answer.request_id, answer.finish_reason) == ("b", FinishReason.ABORT)
    np.testing.assert_array_equal(answer.routed_experts, engine.expected("b"))
    assert client.get_output() == "the step"


# The front end's half.


def make_rows(num_rows: int) -> np.ndarray:
    return np.arange(num_rows * 6, dtype=np.int16).reshape(num_rows, 3, 2)


def send(
    processor: OutputProcessor, request_id: str, tokens=(), num_rows=None, **fields
):
    """Let the engine send an output; return what a client gets, if anything."""
    if num_rows is not None:
        fields["routed_experts"] = make_rows(num_rows)
    output = EngineCoreOutput(request_id, list(tokens), **fields)
    return processor.process_outputs([output])


def add(
    processor: OutputProcessor, name: str, resumable: bool = False, **params
) -> None:
    sampling_params = SamplingParams(routed_experts_layout="split", **params)

    def make(request_id: str, params: SamplingParams) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=PROMPT,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
            external_req_id=name,
        )

    if sampling_params.n == 1:
        processor.add_request(make(name, sampling_params), None)
        return
    parent = ParentRequest(make(name, sampling_params))
    for index in range(sampling_params.n):
        child = make(*parent.get_child_info(index))
        processor.add_request(child, None, parent, index)


@pytest.fixture
def processor() -> OutputProcessor:
    return OutputProcessor(tokenizer=None, log_stats=False)


def stop_at(processor: OutputProcessor, request_id: str, token_id: int) -> None:
    """Let a token be what a stop string is found in."""
    detokenizer = processor.request_states[request_id].detokenizer
    update = detokenizer.update

    def update_and_look(token_ids, stop_terminated):
        update(token_ids, stop_terminated)
        return "the end" if token_id in token_ids else None

    detokenizer.update = update_and_look


def assert_ends(processed, tokens: list[int], num_generated: int) -> None:
    (output,) = processed.request_outputs
    choice = output.outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "the end")
    assert list(choice.token_ids) == tokens
    assert processed.reqs_to_abort == processed.reqs_to_answer == []
    rows = np.concatenate([output.prompt_routed_experts, choice.routed_experts])
    np.testing.assert_array_equal(rows, make_rows(11 + num_generated - 1))


@pytest.mark.parametrize(
    "kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA]
)
@pytest.mark.parametrize(
    "last",
    [{"finish_reason": FinishReason.ABORT}, {"finish_reason": FinishReason.LENGTH}],
)
def test_the_end_at_a_stop_string_is_held_back_until_its_rows_are_there(
    processor: OutputProcessor, kind: RequestOutputKind, last: dict
):
    add(processor, "a", output_kind=kind)
    stop_at(processor, "a", 7)
    send(processor, "a", [5])
    stopped = send(processor, "a", [6, 7])
    assert (stopped.request_outputs, stopped.reqs_to_abort) == ([], [])
    assert stopped.reqs_to_answer == ["a"]
    # The engine runs ahead until it knows, or ends the request by itself.
    ahead = send(processor, "a", [8])
    assert (ahead.request_outputs, ahead.reqs_to_answer) == ([], [])
    ended = send(processor, "a", [9, 10], num_rows=11 + 6 - 1, **last)
    tokens = [6, 7] if kind == RequestOutputKind.DELTA else [5, 6, 7]
    assert_ends(ended, tokens, num_generated=3)
    assert not processor.has_unfinished_requests()


def test_a_stop_string_in_the_engine_s_last_output_waits_for_nothing(
    processor: OutputProcessor,
):
    add(processor, "a")
    stop_at(processor, "a", 7)
    length = FinishReason.LENGTH
    assert_ends(send(processor, "a", [7], 11, finish_reason=length), [7], 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"error": "token 3 has none"}, "token 3 has none"),
        (
            {"num_rows": 10},
            "request a: routed experts rows 10 != prompt 11 - start 0 + generated 1 - 1",
        ),
        (
            {},
            "request a: routed experts rows 0 != prompt 11 - start 0 + generated 1 - 1",
        ),
    ],
)
def test_a_stop_string_without_all_its_rows_is_an_error(
    processor: OutputProcessor, fields: dict, message: str
):
    add(processor, "a")
    stop_at(processor, "a", 7)
    send(processor, "a", [7])
    ended = send(processor, "a", finish_reason=FinishReason.ABORT, **fields)
    choice = ended.request_outputs[0].outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("error", message)
    assert choice.routed_experts is None


def test_a_stop_string_of_a_request_without_rows_ends_it_at_once(
    processor: OutputProcessor,
):
    add(processor, "a", return_routed_experts=False)
    stop_at(processor, "a", 7)
    stopped = send(processor, "a", [7])
    assert stopped.request_outputs[0].finished
    assert (stopped.reqs_to_abort, stopped.reqs_to_answer) == (["a"], [])


class FrontEnd(AsyncLLM):
    """What AsyncLLM.abort() needs, recording what it tells the engine."""

    def __init__(self, output_processor: OutputProcessor) -> None:
        self.told: list[tuple[str, list[str]]] = []
        self.log_requests = False
        self.output_processor = output_processor
        self.engine_core = SimpleNamespace(
            abort_and_answer_async=self._tell("answer"),
            abort_requests_async=self._tell("abort"),
        )

    def __del__(self):
        pass

    def _tell(self, what: str):
        async def tell(request_ids):
            if request_ids:
                self.told.append((what, list(request_ids)))

        return tell


@pytest.mark.parametrize(
    ("request_ids", "internal", "told"),
    [
        ("with", False, [("answer", ["with"])]),
        (("both",), False, [("answer", ["0_both", "1_both"])]),
        (["without"], False, [("abort", ["without"])]),
        (["session", "unknown"], False, [("abort", ["session"])]),
        (["with", "without"], False, [("answer", ["with"]), ("abort", ["without"])]),
        # A client that went away gets nothing.
        (["with"], True, [("abort", ["with"])]),
    ],
)
def test_the_engine_ends_requests_that_wait_for_rows_and_the_front_end_others(
    processor: OutputProcessor, request_ids, internal: bool, told: list
):
    add(processor, "with")
    add(processor, "both", n=2)
    add(processor, "without", return_routed_experts=False)
    add(processor, "session", resumable=True)
    front_end = FrontEnd(processor)
    asyncio.run(front_end.abort(request_ids, internal=internal))
    assert front_end.told == told


def test_a_choice_that_has_ended_is_not_waited_for(processor: OutputProcessor):
    add(processor, "both", n=2)
    send(processor, "0_both", finish_reason=FinishReason.ABORT)
    front_end = FrontEnd(processor)
    asyncio.run(front_end.abort("both"))
    assert front_end.told == [("answer", ["1_both"])]


def test_abort_before_the_first_token_has_no_rows_and_is_no_error(
    processor: OutputProcessor,
):
    add(processor, "a")
    ended = send(processor, "a", num_rows=11, finish_reason=FinishReason.ABORT)
    (output,) = ended.request_outputs
    assert output.outputs[0].finish_reason == "abort"
    assert output.prompt_routed_experts is None
    assert output.outputs[0].routed_experts is None
