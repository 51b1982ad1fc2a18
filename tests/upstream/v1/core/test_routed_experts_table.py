# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The routing table by itself: rows by KV-cache slot, and which of them are real."""

import re

import numpy as np
import pytest

from vllm.v1.core.routed_experts_manager import (
    MissingRoutedExpertsError,
    RoutedExpertsTable,
)
from vllm.v1.routed_experts import RoutedExpertsInfo, StepRoutedExperts

INFO = RoutedExpertsInfo(num_layers=3, moe_layers=[0, 2], num_experts=16, top_k=2)
BLOCK_SIZE = 4


def make_rows(tokens: list[int], mark: int = 0) -> np.ndarray:
    """Rows whose ids depend on token, layer and column."""
    token = np.array(tokens)[:, None, None]
    cell = np.arange(6).reshape(3, 2)
    return (token * 6 + cell + mark).astype(INFO.dtype)


def write(
    table: RoutedExpertsTable, slots: list[int], rows: np.ndarray, step: int = 1
) -> int:
    return table.write(StepRoutedExperts(np.array(slots, dtype=np.int64), rows), step)


@pytest.fixture
def table() -> RoutedExpertsTable:
    table = RoutedExpertsTable(INFO, num_blocks=8, block_size=BLOCK_SIZE)
    # An untouched cell must not pass for an id.
    table._rows.fill(255)
    return table


def test_rows_are_read_in_token_order_from_blocks_in_any_order(
    table: RoutedExpertsTable,
):
    # Tokens 0..7 of a request that owns blocks 5 and 2, written back to front.
    slots = [20, 21, 22, 23, 8, 9, 10, 11]
    assert write(table, slots[::-1], make_rows(list(range(8)))[::-1]) == 8
    np.testing.assert_array_equal(table.read([5, 2], 0, 8), make_rows(list(range(8))))


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1), (0, 4), (0, 5), (3, 4), (3, 5), (4, 4), (4, 5), (4, 8), (5, 8), (7, 8)],
)
def test_a_part_is_read_without_its_neighbours(table: RoutedExpertsTable, start, stop):
    write(table, [20, 21, 22, 23, 8, 9, 10, 11], make_rows(list(range(8))))
    expected = make_rows(list(range(8)))[start:stop]
    np.testing.assert_array_equal(table.read([5, 2], start, stop), expected)


def test_an_empty_part_has_the_shape_of_a_row(table: RoutedExpertsTable):
    rows = table.read([], 0, 0)
    assert rows.shape == (0, 3, 2)
    assert rows.dtype == np.uint8


def test_what_was_read_does_not_change_with_the_table(table: RoutedExpertsTable):
    write(table, [4, 5], make_rows([0, 1]))
    rows = table.read([1], 0, 2)
    write(table, [4, 5], make_rows([8, 9]), step=2)
    np.testing.assert_array_equal(rows, make_rows([0, 1]))


def test_slot_minus_one_writes_nowhere(table: RoutedExpertsTable):
    assert write(table, [4, -1, 5], make_rows([0, 30, 1])) == 2
    np.testing.assert_array_equal(table.read([1], 0, 2), make_rows([0, 1]))
    # -1 is not the last slot of the last block.
    assert (table._rows[-1] == 255).all()
    assert not table._is_valid[-1]


def test_a_step_with_nothing_but_padding_writes_nothing(table: RoutedExpertsTable):
    assert write(table, [-1, -1], make_rows([0, 1])) == 0
    assert not table._is_valid.any()


def test_a_row_that_was_never_written_is_an_error_that_names_it(
    table: RoutedExpertsTable,
):
    write(table, [20, 21, 23], make_rows([0, 1, 3]))
    message = "expected routed experts of tokens [1, 4), token 2 has none"
    with pytest.raises(MissingRoutedExpertsError, match=f"^{re.escape(message)}$"):
        table.read([5], 1, 4)


def test_a_row_beyond_the_blocks_is_an_error_that_names_it(table: RoutedExpertsTable):
    write(table, [20, 21, 22, 23], make_rows([0, 1, 2, 3]))
    message = "expected routed experts of tokens [0, 5), token 4 has none"
    with pytest.raises(MissingRoutedExpertsError, match=f"^{re.escape(message)}$"):
        table.read([5], 0, 5)


def test_a_block_with_a_new_owner_has_forgotten_its_rows(table: RoutedExpertsTable):
    write(table, [16, 17, 18, 19, 20, 21], make_rows(list(range(6))))
    table.hand_out([5], step=2)
    np.testing.assert_array_equal(table.read([4], 0, 4), make_rows([0, 1, 2, 3]))
    with pytest.raises(MissingRoutedExpertsError, match=r"token 0 has none$"):
        table.read([5], 0, 2)


def test_late_rows_do_not_reach_a_block_s_new_owner(table: RoutedExpertsTable):
    table.hand_out([4, 5], step=1)
    table.hand_out([5], step=2)
    # Rows of step 1, whose owner of block 5 has lost it meanwhile.
    assert write(table, [16, 20], make_rows([0, 1]), step=1) == 1
    np.testing.assert_array_equal(table.read([4], 0, 1), make_rows([0]))
    with pytest.raises(MissingRoutedExpertsError, match=r"token 0 has none$"):
        table.read([5], 0, 1)


@pytest.mark.parametrize(("step", "num_stored"), [(2, 0), (3, 1), (4, 1)])
def test_a_block_takes_rows_from_the_step_that_got_it_on(
    table: RoutedExpertsTable, step: int, num_stored: int
):
    table.hand_out([5], step=3)
    assert write(table, [20], make_rows([1]), step=step) == num_stored


def test_a_row_written_again_is_the_later_one(table: RoutedExpertsTable):
    write(table, [20], make_rows([1]), step=1)
    write(table, [20], make_rows([1], mark=40), step=2)
    np.testing.assert_array_equal(table.read([5], 0, 1), make_rows([1], mark=40))


@pytest.mark.parametrize(
    ("slots", "stop", "expected"),
    [
        ([], 0, 0),
        ([], 3, 0),
        ([20], 3, 1),
        ([20, 21, 22], 3, 3),
        ([20, 22], 3, 1),
        ([20, 21, 22, 23, 8], 5, 5),
        ([20, 21, 22, 23, 8], 8, 5),
        ([20, 21, 22, 23, 9], 8, 4),
        # More tokens than the blocks hold.
        ([20, 21, 22, 23, 8, 9, 10, 11], 9, 8),
    ],
)
def test_leading_rows_end_at_the_first_gap(
    table: RoutedExpertsTable, slots: list[int], stop: int, expected: int
):
    write(table, slots, make_rows(list(range(len(slots)))))
    assert table.num_leading_rows([5, 2], stop) == expected


def test_read_only_rows_are_stored(table: RoutedExpertsTable):
    slots, rows = np.array([20, -1], dtype=np.int64), make_rows([3, 4])
    slots.flags.writeable = rows.flags.writeable = False
    assert table.write(StepRoutedExperts(slots, rows), 1) == 1
    np.testing.assert_array_equal(table.read([5], 0, 1), make_rows([3]))


def test_strided_rows_are_stored(table: RoutedExpertsTable):
    every_second = make_rows(list(range(6)))[::2]
    write(table, [20, 21, 22], every_second)
    np.testing.assert_array_equal(table.read([5], 0, 3), make_rows([0, 2, 4]))


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, "uint8"), (257, "int16")])
def test_the_table_holds_the_wire_type(num_experts: int, dtype: str):
    info = RoutedExpertsInfo(
        num_layers=1, moe_layers=[0], num_experts=num_experts, top_k=1
    )
    table = RoutedExpertsTable(info, num_blocks=2, block_size=BLOCK_SIZE)
    last = np.array([[[num_experts - 1]]], dtype=dtype)
    write(table, [4], last)
    rows = table.read([1], 0, 1)
    assert rows.dtype == np.dtype(dtype)
    assert rows.tolist() == [[[num_experts - 1]]]


def test_the_table_is_as_large_as_its_slots_and_says_so():
    table = RoutedExpertsTable(INFO, num_blocks=10, block_size=BLOCK_SIZE)
    assert table.shape == (40, 3, 2)
    # Rows of one byte a cell, a mark and a version of four bytes a slot, one step of
    # eight bytes a block.
    assert table.nbytes == 40 * 6 + 40 + 40 * 4 + 10 * 8
