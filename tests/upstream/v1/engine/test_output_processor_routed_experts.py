# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From the engine's rows to the arrays of a RequestOutput, without an engine."""

import asyncio
import re

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

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
PROMPT = [1, 2, 3, 4, 5]


def make_rows(start: int, stop: int, mark: int = 0) -> np.ndarray:
    """Rows of tokens [start, stop): ids depend on token, layer and column."""
    token = np.arange(start, stop)[:, None, None]
    return (token * 6 + np.arange(6).reshape(3, 2) + mark).astype(np.uint8)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word "wi"."""
    model = WordLevel({f"w{i}": i for i in range(200)}, unk_token="w0")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class FrontEnd:
    """An output processor and what one asks of it, with or without a queue."""

    def __init__(
        self, tokenizer=None, *, has_queue: bool = False, stream_interval: int = 1
    ):
        self.processor = OutputProcessor(
            tokenizer, log_stats=True, stream_interval=stream_interval
        )
        self.has_queue = has_queue
        self.queues: dict[str, RequestOutputCollector] = {}
        self.aborted: list[str] = []

    def add(
        self, name="a", *, kind=FINAL_ONLY, n: int = 1, prompt_len: int = 5, **params
    ) -> None:
        sampling_params = SamplingParams(output_kind=kind, n=n, max_tokens=50, **params)
        self.prompt = list(range(1, prompt_len + 1))
        parent = None
        if self.has_queue:
            self.queues[name] = RequestOutputCollector(kind, name)
        if n > 1:
            parent = ParentRequest(self._request(name, name, sampling_params))
        for index in range(n):
            request_id, child_params = name, sampling_params
            if parent is not None:
                request_id, child_params = parent.get_child_info(index)
            self.processor.add_request(
                self._request(request_id, name, child_params),
                "a prompt",
                parent,
                index,
                self.queues.get(name),
            )

    def _request(self, request_id: str, external_id: str, params: SamplingParams):
        class Request(EngineCoreRequest):
            @property
            def params(self):
                return self.sampling_params

        return Request(
            request_id=request_id,
            prompt_token_ids=list(self.prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=external_id,
        )

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
        processed = self.processor.process_outputs([output], 1.0, IterationStats())
        self.aborted += processed.reqs_to_abort
        return processed.request_outputs

    def get(self, name: str = "a") -> RequestOutput:
        return asyncio.run(self.queues[name].get())


def assert_split(
    output: RequestOutput, start: int, num_generated: int, mark: int = 0
) -> None:
    """Rows [start, P) are the prompt's, [P, S - 1) those of the one choice."""
    num_prompt = len(PROMPT)
    prompt_rows, rows = output.prompt_routed_experts, output.outputs[0].routed_experts
    np.testing.assert_array_equal(prompt_rows, make_rows(start, num_prompt, mark))
    stop = num_prompt + num_generated - 1
    np.testing.assert_array_equal(rows, make_rows(num_prompt, stop, mark))
    assert prompt_rows.dtype == rows.dtype == np.uint8
    assert prompt_rows.shape[1:] == rows.shape[1:] == (3, 2)


# Splitting.


@pytest.mark.parametrize("start", [0, 1, 4, 5])
@pytest.mark.parametrize("num_generated", [1, 2, 7])
def test_rows_are_split_at_the_end_of_the_prompt(start: int, num_generated: int):
    front_end = FrontEnd()
    front_end.add(routed_experts_prompt_start=start)
    for token in range(num_generated - 1):
        assert front_end.receive([token]) == []
    rows = make_rows(start, 5 + num_generated - 1)
    (output,) = front_end.receive([99], rows, FinishReason.LENGTH)
    assert_split(output, start, num_generated)


def test_a_request_without_rows_has_none_and_no_error():
    front_end = FrontEnd()
    front_end.add(return_routed_experts=False)
    (output,) = front_end.receive([1, 2], None, FinishReason.LENGTH)
    assert output.prompt_routed_experts is None
    assert output.outputs[0].routed_experts is None
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL_ONLY])
def test_rows_come_once_with_the_finish_reason(kind: RequestOutputKind):
    front_end = FrontEnd()
    front_end.add(kind=kind)
    outputs = front_end.receive([7]) + front_end.receive([8])
    assert len(outputs) == (0 if kind == FINAL_ONLY else 2)
    assert all(output.prompt_routed_experts is None for output in outputs)
    assert all(output.outputs[0].routed_experts is None for output in outputs)
    (output,) = front_end.receive([9], make_rows(0, 7), FinishReason.STOP)
    assert_split(output, 0, 3)


@pytest.mark.parametrize("stream_interval", [2, 5])
def test_rows_count_all_tokens_when_chunks_hold_several(stream_interval: int):
    front_end = FrontEnd(stream_interval=stream_interval)
    front_end.add(kind=DELTA)
    for token in range(6):
        front_end.receive([token])
    (output,) = front_end.receive([6], make_rows(0, 11), FinishReason.LENGTH)
    assert len(output.outputs[0].token_ids) < 7
    assert_split(output, 0, 7)


# Rows that come piece by piece, because the front end may find a stop string.


@pytest.mark.parametrize("start", [0, 3, 5])
def test_pieces_are_put_together_in_their_order(start: int):
    front_end = FrontEnd()
    front_end.add(routed_experts_prompt_start=start)
    front_end.receive([1], make_rows(start, 5))
    front_end.receive([2, 3, 4], make_rows(5, 8))
    front_end.receive([5], make_rows(8, 9))
    (output,) = front_end.receive([6], make_rows(9, 10), FinishReason.LENGTH)
    assert_split(output, start, 6)


def test_a_stop_string_ends_the_request_with_rows_of_the_tokens_returned(tokenizer):
    front_end = FrontEnd(tokenizer)
    front_end.add(stop=["w7"])
    front_end.receive([3], make_rows(0, 5))
    (output,) = front_end.receive([7], make_rows(5, 6))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "w7")
    assert list(completion.token_ids) == [3, 7]
    assert_split(output, 0, 2)
    assert front_end.aborted == ["a"]


def test_a_stop_string_among_several_new_tokens_keeps_the_rows_of_all_of_them(
    tokenizer,
):
    front_end = FrontEnd(tokenizer)
    front_end.add(stop=["w7"])
    front_end.receive([3], make_rows(0, 5))
    # Three accepted drafts and a sampled token; vLLM returns all of their ids.
    (output,) = front_end.receive([4, 7, 8, 9], make_rows(5, 9))
    num_generated = len(output.outputs[0].token_ids)
    assert output.outputs[0].finish_reason == "stop"
    assert num_generated == 5
    assert_split(output, 0, num_generated)


def test_rows_beyond_the_last_returned_token_but_one_are_left_out():
    front_end = FrontEnd()
    front_end.add()
    (output,) = front_end.receive([3, 4], make_rows(0, 20), FinishReason.STOP)
    assert_split(output, 0, 2)


def test_outputs_of_the_engine_after_a_stop_string_are_ignored(tokenizer):
    front_end = FrontEnd(tokenizer)
    front_end.add(stop=["w7"])
    (output,) = front_end.receive([7], make_rows(0, 5))
    assert front_end.receive([8], make_rows(5, 6)) == []
    assert_split(output, 0, 1)
    assert front_end.processor.get_num_unfinished_requests() == 0


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


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_merged_outputs_of_two_children_keep_each_its_own_rows(order: tuple[int, int]):
    front_end = FrontEnd(has_queue=True)
    front_end.add(kind=DELTA, n=2)
    for child in order:
        front_end.receive([9], None, request_id=f"{child}_a")
    for child in order:
        rows = np.concatenate([make_rows(0, 5), make_rows(5, 6, mark=100 * child)])
        front_end.receive([8], rows, FinishReason.LENGTH, f"{child}_a")
    output = front_end.get()
    assert output.finished
    np.testing.assert_array_equal(output.prompt_routed_experts, make_rows(0, 5))
    by_index = {c.index: c.routed_experts for c in output.outputs}
    for child in order:
        np.testing.assert_array_equal(
            by_index[child], make_rows(5, 6, mark=100 * child)
        )


# Several choices of one prompt.


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_each_choice_has_its_own_rows_and_the_prompt_has_them_once(order):
    front_end = FrontEnd()
    front_end.add(n=3)
    outputs = []
    for child in order:
        rows = np.concatenate(
            [make_rows(0, 5), make_rows(5, 6 + child, mark=70 * child)]
        )
        tokens = [9] * (child + 2)
        outputs += front_end.receive(tokens, rows, FinishReason.LENGTH, f"{child}_a")
    (output,) = outputs
    np.testing.assert_array_equal(output.prompt_routed_experts, make_rows(0, 5))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for child, completion in enumerate(output.outputs):
        expected = make_rows(5, 6 + child, mark=70 * child)
        np.testing.assert_array_equal(completion.routed_experts, expected)


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("start", [0, 3, 5])
def test_in_layout_full_each_choice_has_all_rows_of_its_own_pass(kind, order, start):
    front_end = FrontEnd()
    front_end.add(
        kind=kind,
        n=3,
        routed_experts_layout="full",
        routed_experts_prompt_start=start,
    )
    outputs = []
    for child in order:
        rows = make_rows(start, 6 + child, mark=70 * child)
        tokens = [9] * (child + 2)
        outputs += front_end.receive(tokens, rows, FinishReason.LENGTH, f"{child}_a")
    assert all(output.prompt_routed_experts is None for output in outputs)
    completions = [choice for output in outputs for choice in output.outputs]
    assert sorted(choice.index for choice in completions) == [0, 1, 2]
    for choice in completions:
        expected = make_rows(start, 6 + choice.index, mark=70 * choice.index)
        np.testing.assert_array_equal(choice.routed_experts, expected)


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_a_chunk_of_an_unfinished_choice_carries_no_rows(kind: RequestOutputKind):
    front_end = FrontEnd()
    front_end.add(kind=kind, n=2)
    (done,) = front_end.receive([9], make_rows(0, 5), FinishReason.LENGTH, "0_a")
    assert_split(done, 0, 1)
    (chunk,) = front_end.receive([8], None, None, "1_a")
    assert chunk.prompt_routed_experts is None
    assert chunk.outputs[0].routed_experts is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_choice_that_ended_without_a_token_takes_no_prompt_rows_from_the_other(order):
    front_end = FrontEnd()
    front_end.add(n=2)
    answers = [([], None), ([8, 9], make_rows(0, 6))]
    outputs = []
    for child in order:
        outputs += front_end.receive(*answers[child], FinishReason.ABORT, f"{child}_a")
    (output,) = outputs
    np.testing.assert_array_equal(output.prompt_routed_experts, make_rows(0, 5))
    assert output.outputs[0].routed_experts is None
    np.testing.assert_array_equal(output.outputs[1].routed_experts, make_rows(5, 6))


# Rows that are missing.


MISSING = "request a: routed experts rows 6 != prompt 5 - start 0 + generated 3 - 1"


def test_too_few_rows_are_an_error_offline_and_never_a_short_array():
    front_end = FrontEnd()
    front_end.add()
    (output,) = front_end.receive([1, 2, 3], make_rows(0, 6), FinishReason.LENGTH)
    assert output.finished
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == MISSING
    assert output.prompt_routed_experts is None
    assert output.outputs[0].routed_experts is None


def test_too_few_rows_raise_in_the_generator():
    front_end = FrontEnd(has_queue=True)
    front_end.add()
    assert front_end.receive([1, 2, 3], make_rows(0, 6), FinishReason.LENGTH) == []
    with pytest.raises(EngineGenerateError, match=f"^{re.escape(MISSING)}$"):
        front_end.get()
    assert front_end.processor.get_num_unfinished_requests() == 0
    # The engine has finished it by itself.
    assert front_end.aborted == []


@pytest.mark.parametrize("num_rows", [5, 6, 7])
def test_as_many_rows_as_tokens_but_one_are_enough(num_rows: int):
    front_end = FrontEnd()
    front_end.add()
    (output,) = front_end.receive([1, 2], make_rows(0, num_rows), FinishReason.LENGTH)
    is_right = output.outputs[0].finish_reason == "length"
    assert is_right == (num_rows >= 6)


def test_too_few_rows_at_a_stop_string_end_the_request_in_the_engine_too(tokenizer):
    front_end = FrontEnd(tokenizer, has_queue=True)
    front_end.add(stop=["w7"])
    front_end.receive([3], make_rows(0, 5))
    front_end.receive([7], None)
    message = "request a: routed experts rows 5 != prompt 5 - start 0 + generated 2 - 1"
    with pytest.raises(EngineGenerateError, match=f"^{re.escape(message)}$"):
        front_end.get()
    assert front_end.aborted == ["a"]


@pytest.mark.parametrize("finish_reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_the_engine_s_own_words_reach_the_generator(finish_reason: FinishReason):
    front_end = FrontEnd(has_queue=True)
    front_end.add()
    error = "request a: expected routed experts of tokens [0, 7), token 3 has none"
    front_end.receive([1], None, finish_reason, error=error)
    with pytest.raises(EngineGenerateError, match=f"^{re.escape(error)}$"):
        front_end.get()
    assert front_end.processor.get_num_unfinished_requests() == 0


def test_the_engine_s_own_words_are_the_stop_reason_offline():
    front_end = FrontEnd()
    front_end.add()
    (output,) = front_end.receive([1], make_rows(0, 5), FinishReason.ERROR, error="why")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
        "error",
        "why",
    )
    assert output.prompt_routed_experts is None


def test_an_error_is_not_lost_when_another_choice_speaks_after_it():
    front_end = FrontEnd(has_queue=True)
    front_end.add(kind=DELTA, n=2)
    front_end.receive([1], None, FinishReason.ERROR, "0_a", error="why")
    front_end.receive([2], None, None, "1_a")
    with pytest.raises(EngineGenerateError, match="^why$"):
        front_end.get()


def test_the_other_choices_of_a_failed_request_can_be_aborted_by_its_id():
    front_end = FrontEnd(has_queue=True)
    front_end.add(kind=DELTA, n=2)
    front_end.receive([1], None, FinishReason.ERROR, "0_a", error="why")
    assert front_end.processor.abort_requests(["a"], internal=True) == ["1_a"]
    assert front_end.processor.get_num_unfinished_requests() == 0
    assert front_end.processor.parent_requests == {}


def test_a_failed_request_counts_as_finished():
    front_end = FrontEnd(has_queue=True)
    front_end.add()
    stats = IterationStats()
    output = EngineCoreOutput(
        request_id="a", new_token_ids=[1], finish_reason=FinishReason.ERROR, error="why"
    )
    front_end.processor.process_outputs([output], 1.0, stats)
    assert [str(r.finish_reason) for r in stats.finished_requests] == ["error"]


# Aborts.


def test_an_answered_abort_adds_the_last_rows_to_the_pieces():
    front_end = FrontEnd()
    front_end.add(routed_experts_prompt_start=2)
    front_end.receive([1], make_rows(2, 5))
    front_end.receive([2], make_rows(5, 6))
    (output,) = front_end.receive([], make_rows(6, 6), FinishReason.ABORT)
    assert_split(output, 2, 2)


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


# What a reader sees.


def test_the_repr_of_an_output_shows_the_shape_and_not_the_rows():
    front_end = FrontEnd()
    front_end.add()
    (output,) = front_end.receive([1, 2, 3], make_rows(0, 7), FinishReason.LENGTH)
    assert "routed_experts=(2, 3, 2)" in repr(output.outputs[0])
