# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows with every output of a choice, without an engine."""

import numpy as np
from test_output_processor_routed_experts import (
    DELTA,
    FrontEnd,
    assert_split,
    make_rows,
)

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.routed_experts import hand_out_rows_of_step


def deltas(front: FrontEnd, **params) -> None:
    front.add(kind=DELTA, routed_experts_stream="delta", **params)


def test_each_output_has_the_rows_of_its_tokens():
    front = FrontEnd()
    deltas(front)
    (output,) = front.receive([7], make_rows(0, 5))
    assert_split(output, 0, 1)
    (output,) = front.receive([8, 9], make_rows(5, 7))
    assert output.prompt_routed_experts is None
    np.testing.assert_array_equal(output.outputs[0].routed_experts, make_rows(5, 7))
    (output,) = front.receive([10], make_rows(7, 8), FinishReason.LENGTH)
    np.testing.assert_array_equal(output.outputs[0].routed_experts, make_rows(7, 8))


def test_rows_of_a_step_are_handed_to_the_outputs_they_belong_to():
    outputs = [EngineCoreOutput("a", [7, 8], num_routed_experts=2)]
    outputs += [EngineCoreOutput("b", [7]), EngineCoreOutput("c", [7])]
    outputs[2].num_routed_experts = 1
    step = EngineCoreOutputs(outputs=outputs)
    step.routed_experts = make_rows(0, 3)
    hand_out_rows_of_step(step)
    assert outputs[1].routed_experts is None
    np.testing.assert_array_equal(outputs[0].routed_experts, make_rows(0, 2))
    np.testing.assert_array_equal(outputs[2].routed_experts, make_rows(2, 3))


def test_outputs_merged_for_a_slow_reader_keep_all_rows():
    front = FrontEnd(has_queue=True)
    deltas(front)
    front.receive([7], make_rows(0, 5))
    for row in range(5, 40):
        front.receive([8], make_rows(row, row + 1))
    output = front.get()
    assert_split(output, 0, 36)
    front.receive([8], make_rows(40, 41), FinishReason.LENGTH)
    output = front.get()
    np.testing.assert_array_equal(output.outputs[0].routed_experts, make_rows(40, 41))


def test_stream_interval_keeps_rows_back_with_the_tokens():
    front = FrontEnd(stream_interval=3)
    deltas(front)
    sent = front.receive([7], make_rows(0, 5))
    for row in range(5, 12):
        sent += front.receive([8], make_rows(row, row + 1))
    sizes = [
        (len(o.outputs[0].token_ids), len(o.outputs[0].routed_experts)) for o in sent
    ]
    assert sizes == [(1, 0), (3, 3), (3, 3)]


def test_other_choices_wait_for_the_prompts_rows_and_lose_nothing():
    front = FrontEnd()
    deltas(front, n=2)
    empty = make_rows(5, 5)
    assert front.receive([7], empty, request_id="1_a") == []
    assert front.receive([8], make_rows(5, 6, 9), request_id="1_a") == []
    (output,) = front.receive([7], make_rows(0, 5), request_id="0_a")
    np.testing.assert_array_equal(output.prompt_routed_experts, make_rows(0, 5))
    rows = {o.index: (list(o.token_ids), o.routed_experts) for o in output.outputs}
    assert rows[0][0] == [7] and rows[0][1].shape == (0, 3, 2)
    assert rows[1][0] == [7, 8]
    np.testing.assert_array_equal(rows[1][1], make_rows(5, 6, 9))
    (output,) = front.receive([9], make_rows(6, 7, 9), request_id="1_a")
    assert output.prompt_routed_experts is None


def test_the_prompts_rows_are_dropped_when_all_choices_have_begun():
    front = FrontEnd()
    deltas(front)
    front.receive([7], make_rows(0, 5))
    assert front.processor.request_states["a"].routed_experts.prompt.rows is None
