# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The rows of a beam are those of the requests that it descends from."""

import numpy as np
import pytest

from vllm.beam_search import BeamSearchSequence


def make_beam(num_rows: int) -> BeamSearchSequence:
    """A beam with three prompt rows and a row for each token but the last."""
    beam = BeamSearchSequence(orig_prompt={"type": "token"}, tokens=[], logprobs=[])
    rows = np.arange(3 + num_rows, dtype=np.uint8).reshape(-1, 1, 1)
    beam.routed_experts = (
        [rows[:3], *np.split(rows[3:], num_rows)] if num_rows else [rows]
    )
    return beam


@pytest.mark.parametrize("num_generated", [1, 2, 4])
def test_one_row_fewer_than_tokens(num_generated: int):
    rows = make_beam(num_generated - 1).get_routed_experts(num_generated)
    assert rows is not None
    assert rows.shape == (num_generated - 1, 1, 1)
    assert rows.ravel().tolist() == list(range(3, 2 + num_generated))


def test_row_before_an_end_token_that_is_not_returned_is_left_out():
    rows = make_beam(3).get_routed_experts(3)
    assert rows is not None and rows.ravel().tolist() == [3, 4]


def test_beam_without_rows_or_tokens_has_none():
    beam = make_beam(1)
    assert beam.get_routed_experts(0) is None
    beam.routed_experts = []
    assert beam.get_routed_experts(1) is None
