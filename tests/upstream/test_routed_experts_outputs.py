# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routed experts of a request are gathered and survive the merging of outputs."""

import numpy as np
import pytest

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.output_processor import RoutedExpertsPieces

PROMPT_ROWS = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
ROWS = PROMPT_ROWS + 100


def make_output(
    token_id: int,
    rows: np.ndarray | None = None,
    prompt_rows: np.ndarray | None = None,
    index: int = 0,
) -> RequestOutput:
    choice = CompletionOutput(
        index=index,
        text=str(token_id),
        token_ids=[token_id],
        cumulative_logprob=None,
        logprobs=None,
        routed_experts=rows,
        finish_reason=None if rows is None else "length",
    )
    return RequestOutput(
        request_id="0",
        prompt="",
        prompt_token_ids=[1, 2],
        prompt_logprobs=None,
        outputs=[choice],
        finished=rows is not None,
        prompt_routed_experts=prompt_rows,
    )


@pytest.mark.parametrize("aggregate", [True, False])
def test_rows_of_the_last_delta_are_kept(aggregate: bool):
    output = make_output(1)
    output.add(make_output(2, ROWS, PROMPT_ROWS), aggregate=aggregate)
    assert output.outputs[0].routed_experts is ROWS
    assert output.prompt_routed_experts is PROMPT_ROWS
    assert output.outputs[0].token_ids == ([1, 2] if aggregate else [2])


def test_rows_are_not_lost_to_a_later_delta_without_rows():
    output = make_output(1, ROWS, PROMPT_ROWS)
    output.add(make_output(2), aggregate=True)
    assert output.outputs[0].routed_experts is ROWS
    assert output.prompt_routed_experts is PROMPT_ROWS


def test_prompt_rows_come_from_whichever_choice_has_them_first():
    output = make_output(1, ROWS, PROMPT_ROWS)
    output.add(make_output(2, ROWS + 1, PROMPT_ROWS + 1, index=1), aggregate=True)
    assert output.prompt_routed_experts is PROMPT_ROWS
    assert [choice.index for choice in output.outputs] == [0, 1]


def test_repr_shows_the_shape_and_not_the_rows():
    text = repr(make_output(1, ROWS).outputs[0])
    assert "routed_experts=(2, 2, 2)" in text


@pytest.mark.parametrize("num_pieces", [1, 2, 63, 64, 65, 200])
def test_pieces_are_joined_in_order(num_pieces: int):
    rows = np.arange(5 * num_pieces, dtype=np.int16).reshape(-1, 1, 1)
    pieces = RoutedExpertsPieces()
    assert not pieces
    for piece in np.split(rows, num_pieces):
        pieces.add(piece)
    assert pieces and pieces.num_rows == len(rows)
    np.testing.assert_array_equal(pieces.join(), rows)


def test_piece_without_rows_is_a_piece():
    pieces = RoutedExpertsPieces()
    pieces.add(PROMPT_ROWS[:0])
    assert pieces and pieces.num_rows == 0
    assert pieces.join().shape == (0, 2, 2)


def test_small_piece_does_not_keep_the_message_it_came_in():
    message = np.zeros((1000, 2, 2), dtype=np.uint8)
    pieces = RoutedExpertsPieces()
    pieces.add(message[500:501])
    assert not np.shares_memory(pieces.join(), message)


def test_large_piece_is_not_copied():
    rows = np.zeros((2**14, 2, 2), dtype=np.uint8)
    pieces = RoutedExpertsPieces()
    pieces.add(rows)
    assert pieces.join() is rows
