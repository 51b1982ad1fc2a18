# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Several choices of one prompt, from the scheduler's table to a RequestOutput."""

from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest

from scheduling import BLOCK_SIZE, INFO, make_engine
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
ONE_ENGINE = SimpleNamespace(data_parallel_size=1, data_parallel_external_lb=False)
SPREAD = SimpleNamespace(data_parallel_size=2, data_parallel_external_lb=False)
# Three full blocks, which the choices share, and three tokens, which each computes.
P = 15
PROMPT = list(range(10, 10 + P))


class Choices:
    """One request with several choices, which end after `lengths` tokens each."""

    is_delta = False  # read by the scheduler's driver

    def __init__(
        self, model: str, lengths: list[int], engines=ONE_ENGINE, **params
    ) -> None:
        # The second choice gets what the first leaves of a step, so that their
        # passes over the last three tokens are different ones.
        self.engine = make_engine(model, 64, max_num_batched_tokens=16)
        self.processor = OutputProcessor(None, log_stats=False)
        self.lengths = lengths
        self.sent: list[EngineCoreOutput] = []
        self.true_rows: dict[str, list[np.ndarray]] = {}
        self.outputs: list[RequestOutput] = []
        request = EngineCoreRequest(
            request_id="a",
            external_req_id="a",
            prompt_token_ids=list(PROMPT),
            mm_features=None,
            sampling_params=SamplingParams(
                n=len(lengths), temperature=1.0, detokenize=False, **params
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        parent = ParentRequest(request, engines)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        for index, length in enumerate(lengths):
            child = copy(request)
            child.request_id, child_params = parent.get_child_info(index)
            child.sampling_params = copy(child_params)
            child.sampling_params.max_tokens = length
            self.processor.add_request(child, None, parent, index)
            # The engine has parameters of its own.
            child.sampling_params = copy(child.sampling_params)
            self.engine.answers[child.request_id] = self
            self.engine.scheduler.add_request(
                Request.from_engine_core_request(child, hasher)
            )

    def add(self, output: EngineCoreOutput, led_to: list[np.ndarray]) -> None:
        """Hand over what the engine sends."""
        self.true_rows[output.request_id] = led_to
        self.sent.append(output)
        self.outputs += self.processor.process_outputs([output]).request_outputs

    def ended(self) -> list[tuple[RequestOutput, int, np.ndarray | None]]:
        """Outputs with what ends a choice, in the order in which they came."""
        for output in self.outputs:
            ends = [choice for choice in output.outputs if choice.finished()]
            assert ends or output.prompt_routed_experts is None
            others = [c.routed_experts for c in output.outputs if not c.finished()]
            assert others == [None] * len(others)
        return [
            (output, choice.index, choice.routed_experts)
            for output in self.outputs
            for choice in output.outputs
            if choice.finished()
        ]

    def expected(self, index: int, start: int, stop: int) -> np.ndarray:
        rows = self.true_rows[f"{index}_a"][start:stop]
        return np.array(rows, dtype=INFO.dtype).reshape(-1, *INFO.row_shape)

    def num_rows_sent(self) -> int:
        rows = [output.routed_experts for output in self.sent]
        return sum(len(r) for r in rows if r is not None)


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
@pytest.mark.parametrize("lengths", [[2, 3, 6], [6, 3, 2], [5, 1, 3], [1, 1, 1]])
@pytest.mark.parametrize("start", [0, 13, P])
@pytest.mark.parametrize(
    ("engines", "times_sent"), [(ONE_ENGINE, 1), (SPREAD, 3)], ids=["one", "spread"]
)
def test_prompt_rows_are_those_of_choice_0_and_sent_once_by_one_engine(
    model: str, engines, times_sent: int, kind, lengths: list[int], start: int
):
    choices = Choices(
        *(model, lengths, engines),
        output_kind=kind,
        routed_experts_layout="split",
        routed_experts_prompt_start=start,
    )
    choices.engine.run()
    ended = choices.ended()
    assert sorted(index for _, index, _ in ended) == [0, 1, 2]
    if start < P:
        others = choices.expected(1, start, P)
        assert not np.array_equal(choices.expected(0, start, P), others)
    for output, index, rows in ended:
        expected = choices.expected(0, start, P)
        np.testing.assert_array_equal(output.prompt_routed_experts, expected)
        expected = choices.expected(index, P, P + lengths[index] - 1)
        np.testing.assert_array_equal(rows, expected)
    num_generated_rows = sum(lengths) - len(lengths)
    assert choices.num_rows_sent() == times_sent * (P - start) + num_generated_rows


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
@pytest.mark.parametrize("start", [0, 13, P])
def test_in_layout_full_each_choice_has_the_prompt_rows_of_its_own_pass(
    model: str, kind: RequestOutputKind, start: int
):
    lengths = [6, 3, 2]
    choices = Choices(
        *(model, lengths),
        output_kind=kind,
        routed_experts_layout="full",
        routed_experts_prompt_start=start,
    )
    choices.engine.run()
    ended = choices.ended()
    assert sorted(index for _, index, _ in ended) == [0, 1, 2]
    for output, index, rows in ended:
        assert output.prompt_routed_experts is None
        expected = choices.expected(index, start, P + lengths[index] - 1)
        np.testing.assert_array_equal(rows, expected)


def test_stream_has_the_prompt_rows_before_choice_0_ends(model: str):
    choices = Choices(
        *(model, [9, 2]), output_kind=DELTA, routed_experts_layout="split"
    )
    choices.engine.run()
    assert [index for _, index, _ in choices.ended()] == [1, 0]
    prompt_rows, *others = (output.routed_experts for output in choices.sent)
    np.testing.assert_array_equal(prompt_rows, choices.expected(0, 0, P))
    assert [len(rows) for rows in others if rows is not None] == [1, 8]
