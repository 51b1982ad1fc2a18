# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From the engine's rows to the arrays of a RequestOutput, without an engine.

Stop strings and aborts: test_routed_experts_aborts.py.
"""

import asyncio
import re
from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats

DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)
ONE_ENGINE = SimpleNamespace(data_parallel_size=1, data_parallel_external_lb=False)
SPREAD = SimpleNamespace(data_parallel_size=2, data_parallel_external_lb=False)


def make_rows(start: int, stop: int, mark: int = 0) -> np.ndarray:
    """Rows of tokens [start, stop): ids depend on token, layer and column."""
    token = np.arange(start, stop)[:, None, None]
    return (token * 6 + np.arange(6).reshape(3, 2) + mark).astype(np.uint8)


class FrontEnd:
    """An output processor and what one asks of it, with or without a queue."""

    def __init__(self, *, has_queue=False, stream_interval=1):
        self.processor = OutputProcessor(
            None, log_stats=True, stream_interval=stream_interval
        )
        self.has_queue = has_queue
        self.queue: RequestOutputCollector | None = None
        self.aborted: list[str] = []
        self.params: list[SamplingParams] = []

    def add(self, *, kind=FINAL_ONLY, n=1, prompt_len=5, engines=ONE_ENGINE, **params):
        """Add request "a", whose choices are "0_a", "1_a" and so on."""
        params = {"routed_experts_layout": "split"} | params
        request = EngineCoreRequest(
            request_id="a",
            prompt_token_ids=list(range(1, prompt_len + 1)),
            mm_features=None,
            sampling_params=SamplingParams(
                output_kind=kind, n=n, max_tokens=50, **params
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id="a",
        )
        if self.has_queue:
            self.queue = RequestOutputCollector(kind, "a")
        parent = ParentRequest(request, engines) if n > 1 else None
        for index in range(n):
            child = copy(request)
            if parent is not None:
                child.request_id, child.sampling_params = parent.get_child_info(index)
            self.params.append(child.sampling_params)
            self.processor.add_request(child, "a prompt", parent, index, self.queue)

    def receive(
        self,
        token_ids: list[int],
        rows: np.ndarray | None = None,
        finish_reason: FinishReason | None = None,
        request_id: str = "a",
        error: str | None = None,
    ) -> list[RequestOutput]:
        """Let the engine send new tokens of one request."""
        output = EngineCoreOutput(
            request_id=request_id,
            new_token_ids=list(token_ids),
            finish_reason=finish_reason,
            routed_experts=rows,
            error=error,
        )
        self.stats = IterationStats()
        processed = self.processor.process_outputs([output], 1.0, self.stats)
        self.aborted += processed.reqs_to_abort
        return processed.request_outputs

    def get(self) -> RequestOutput:
        return asyncio.run(self.queue.get())


def assert_split(output: RequestOutput, start: int, num_generated: int) -> None:
    """Rows [start, P) are the prompt's, [P, S - 1) those of the one choice."""
    prompt_rows, rows = output.prompt_routed_experts, output.outputs[0].routed_experts
    np.testing.assert_array_equal(prompt_rows, make_rows(start, 5))
    np.testing.assert_array_equal(rows, make_rows(5, 4 + num_generated))
    assert prompt_rows.dtype == rows.dtype == np.uint8
    assert prompt_rows.shape[1:] == rows.shape[1:] == (3, 2)


# Splitting.


@pytest.mark.parametrize("start", [0, 1, 4, 5])
@pytest.mark.parametrize("num_generated", [1, 2, 7])
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_rows_are_split_at_the_end_of_the_prompt(
    start: int, num_generated: int, reason: FinishReason
):
    front_end = FrontEnd()
    front_end.add(routed_experts_prompt_start=start)
    for token in range(num_generated - 1):
        assert front_end.receive([token]) == []
    rows = make_rows(start, 5 + num_generated - 1)
    (output,) = front_end.receive([99], rows, reason)
    assert output.outputs[0].finish_reason == str(reason)
    assert_split(output, start, num_generated)
    # What a reader sees is their shape.
    assert f"routed_experts=({num_generated - 1}, 3, 2)" in repr(output.outputs[0])


def test_a_request_without_rows_has_none_and_no_error():
    front_end = FrontEnd()
    front_end.add(return_routed_experts=False)
    (output,) = front_end.receive([1, 2], None, FinishReason.LENGTH)
    assert output.prompt_routed_experts is None
    assert output.outputs[0].routed_experts is None
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("kind", "stream_interval", "num_chunks"),
    [(DELTA, 1, 2), (DELTA, 5, 1), (CUMULATIVE, 1, 2), (FINAL_ONLY, 1, 0)],
)
def test_rows_come_once_with_the_finish_reason(kind, stream_interval, num_chunks):
    front_end = FrontEnd(stream_interval=stream_interval)
    front_end.add(kind=kind)
    outputs = front_end.receive([7]) + front_end.receive([8])
    assert len(outputs) == num_chunks
    assert all(output.prompt_routed_experts is None for output in outputs)
    assert all(output.outputs[0].routed_experts is None for output in outputs)
    (output,) = front_end.receive([9], make_rows(0, 7), FinishReason.STOP)
    assert_split(output, 0, 3)


# What is kept of the engine's messages.


@pytest.mark.parametrize(
    ("num_rows", "shares"), [(9, (False, False)), (20000, (True, False))]
)
def test_few_rows_do_not_keep_a_message_of_many(num_rows: int, shares: tuple):
    message = np.zeros((num_rows, 3, 2), dtype=np.uint8)
    front_end = FrontEnd()
    front_end.add(prompt_len=num_rows - 1)
    (output,) = front_end.receive([3, 4], message, FinishReason.LENGTH)
    parts = (output.prompt_routed_experts, output.outputs[0].routed_experts)
    assert [len(part) for part in parts] == [num_rows - 1, 1]
    assert tuple(np.shares_memory(part, message) for part in parts) == shares


# Merging in the queue, when the consumer is slow.


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_rows_survive_the_merging_of_chunks_in_the_queue(kind: RequestOutputKind):
    front_end = FrontEnd(has_queue=True)
    front_end.add(kind=kind)
    front_end.receive([1])
    front_end.receive([2])
    front_end.receive([3], make_rows(0, 7), FinishReason.LENGTH)
    output = front_end.get()
    assert output.finished
    assert list(output.outputs[0].token_ids) == [1, 2, 3]
    assert_split(output, 0, 3)


# Several choices of one prompt; their rows by value: test_parallel_routed_experts.py.


@pytest.mark.parametrize(
    ("layout", "kind", "engines", "starts", "is_early"),
    [
        ("split", FINAL_ONLY, ONE_ENGINE, [2, 5, 5], False),
        ("split", DELTA, ONE_ENGINE, [2, 5, 5], True),
        ("split", DELTA, SPREAD, [2, 2, 2], True),
        ("full", DELTA, ONE_ENGINE, [2, 2, 2], False),
    ],
)
def test_rows_that_choices_are_asked_for(layout, kind, engines, starts, is_early):
    front_end = FrontEnd()
    front_end.add(
        kind=kind,
        n=3,
        engines=engines,
        routed_experts_layout=layout,
        routed_experts_prompt_start=2,
    )
    assert [p.routed_experts_prompt_start for p in front_end.params] == starts
    early = [p._send_prompt_routed_experts_first for p in front_end.params]
    assert early == [is_early, False, False]


def rows_of_choice(front_end: FrontEnd, index: int, stop: int) -> np.ndarray:
    start = front_end.params[index].routed_experts_prompt_start
    return make_rows(start, stop, mark=70 * index)


both = pytest.mark.parametrize("engines", [ONE_ENGINE, SPREAD], ids=["one", "spread"])


@both
@pytest.mark.parametrize("has_queue", [True, False])
def test_stream_holds_an_end_back_until_choice_0_has_sent_the_prompt_rows(
    engines, has_queue
):
    front_end = FrontEnd(has_queue=has_queue)
    front_end.add(kind=DELTA, n=2, engines=engines)
    outputs = front_end.receive([8], None, None, "1_a")
    rows = rows_of_choice(front_end, 1, 6)
    assert front_end.receive([9], rows, FinishReason.LENGTH, "1_a") == []
    outputs += front_end.receive([9], make_rows(0, 5), None, "0_a")
    if has_queue:
        outputs = [front_end.get()]
    output = outputs[-1]
    assert [choice.index for choice in output.outputs] == [1, 0]
    assert [choice.finished() for choice in output.outputs] == [True, False]
    assert not output.finished
    np.testing.assert_array_equal(output.prompt_routed_experts, make_rows(0, 5))
    expected = make_rows(5, 6, mark=70)
    np.testing.assert_array_equal(output.outputs[0].routed_experts, expected)


@both
def test_merged_ends_of_two_choices_keep_each_its_own_rows(engines):
    front_end = FrontEnd(has_queue=True)
    front_end.add(kind=DELTA, n=2, engines=engines)
    front_end.receive([9], make_rows(0, 5), None, "0_a")
    for index in (1, 0):
        rows = rows_of_choice(front_end, index, 6)[-1 if index == 0 else 0 :]
        tokens = [8] if index == 0 else [7, 8]
        front_end.receive(tokens, rows, FinishReason.LENGTH, f"{index}_a")
    output = front_end.get()
    assert output.finished
    np.testing.assert_array_equal(output.prompt_routed_experts, make_rows(0, 5))
    assert sorted(choice.index for choice in output.outputs) == [0, 1]
    for choice in output.outputs:
        expected = make_rows(5, 6, mark=70 * choice.index)
        np.testing.assert_array_equal(choice.routed_experts, expected)


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_choice_ended_without_a_token_leaves_the_prompt_rows_to_the_other(order, kind):
    front_end = FrontEnd()
    front_end.add(kind=kind, n=2, engines=SPREAD)
    answers = [([], None), ([8, 9], make_rows(0, 6, mark=70))]
    outputs = []
    for index in order:
        outputs += front_end.receive(*answers[index], FinishReason.ABORT, f"{index}_a")
    by_index = {choice.index: (o, choice) for o in outputs for choice in o.outputs}
    assert by_index[0][1].routed_experts is None
    output, choice = by_index[1]
    np.testing.assert_array_equal(output.prompt_routed_experts, make_rows(0, 5, 70))
    np.testing.assert_array_equal(choice.routed_experts, make_rows(5, 6, mark=70))


def test_prompt_rows_that_nobody_has_sent_are_none_and_not_an_empty_array():
    front_end = FrontEnd()
    front_end.add(n=2)
    front_end.receive([8, 9], make_rows(5, 6), FinishReason.ABORT, "1_a")
    (output,) = front_end.receive([], None, FinishReason.ABORT, "0_a")
    assert output.prompt_routed_experts is None


# Rows that are missing.


MISSING = "request a: routed experts rows 6 != prompt 5 - start 0 + generated 3 - 1"


def assert_failed(output: RequestOutput, why: str) -> None:
    choice = output.outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("error", why)
    assert output.finished
    assert output.prompt_routed_experts is None and choice.routed_experts is None


def assert_raises(front_end: FrontEnd, why: str) -> None:
    with pytest.raises(EngineGenerateError, match=f"^{re.escape(why)}$"):
        front_end.get()


def test_too_few_rows_are_an_error_offline_and_never_a_short_array():
    front_end = FrontEnd()
    front_end.add()
    (output,) = front_end.receive([1, 2, 3], make_rows(0, 6), FinishReason.LENGTH)
    assert_failed(output, MISSING)


def test_too_few_rows_raise_in_the_generator():
    front_end = FrontEnd(has_queue=True)
    front_end.add()
    assert front_end.receive([1, 2, 3], make_rows(0, 6), FinishReason.LENGTH) == []
    assert_raises(front_end, MISSING)
    assert front_end.processor.get_num_unfinished_requests() == 0
    # The engine has finished it by itself.
    assert front_end.aborted == []


@pytest.mark.parametrize("finish_reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_the_engine_s_own_words_reach_the_generator(finish_reason: FinishReason):
    front_end = FrontEnd(has_queue=True)
    front_end.add()
    front_end.receive([1], None, finish_reason, error="token 3 has none")
    assert_raises(front_end, "token 3 has none")
    assert front_end.processor.get_num_unfinished_requests() == 0
    assert [str(r.finish_reason) for r in front_end.stats.finished_requests] == [
        "error"
    ]


def test_choices_beside_a_failed_one_hide_no_error_and_can_be_aborted_by_its_id():
    front_end = FrontEnd(has_queue=True)
    front_end.add(kind=DELTA, n=2)
    front_end.receive([1], None, FinishReason.ERROR, "0_a", error="why")
    front_end.receive([2], None, None, "1_a")
    assert_raises(front_end, "why")
    assert front_end.processor.abort_requests(["a"], internal=True) == ["1_a"]
    assert front_end.processor.get_num_unfinished_requests() == 0
    assert front_end.processor.parent_requests == {}


# Aborts.


def test_an_abort_in_the_front_end_has_no_rows_rather_than_some():
    front_end = FrontEnd(has_queue=True)
    front_end.add(kind=CUMULATIVE)
    front_end.receive([1, 2])
    front_end.get()
    assert front_end.processor.abort_requests(["a"], internal=True) == ["a"]
    output = front_end.get()
    assert output.outputs[0].finish_reason == "abort"
    assert output.prompt_routed_experts is None
    assert output.outputs[0].routed_experts is None
