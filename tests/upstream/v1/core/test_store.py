"""The table of rows by KV-cache slot: what is not real is an error, never a stale neighbour."""

from __future__ import annotations

import re

import numpy as np
import pytest

from vllm.v1.core.routed_experts_manager import (
    MissingRoutedExpertsError,
    RoutedExpertsTable,
)
from vllm.v1.routed_experts import RoutedExpertsInfo, StepRoutedExperts

BLOCK, BLOCKS = 4, 6
INFO = RoutedExpertsInfo(num_layers=3, moe_layers=[0, 2], num_experts=16, top_k=2)


@pytest.fixture
def table():
    return RoutedExpertsTable(INFO, BLOCKS, BLOCK)


def rows_of(tokens, owner=1):
    """Rows that tell token and owner apart."""
    one = np.arange(6).reshape(3, 2)
    return np.stack([one + 10 * token + owner for token in tokens]).astype(np.uint8)


def put(table, slots, tokens, step, owner=1):
    step_rows = StepRoutedExperts(
        np.array(slots, dtype=np.int64), rows_of(tokens, owner)
    )
    return table.write(step_rows, step)


def test_rows_are_read_in_the_order_of_the_requests_blocks(table):
    table.hand_out([5, 2], step=1)
    put(table, [20, 21, 22, 23, 8, 9], range(6), step=1)
    assert np.array_equal(table.read([5, 2], 0, 6), rows_of(range(6)))
    assert np.array_equal(table.read([5, 2], 3, 5), rows_of([3, 4]))
    assert table.read([5, 2], 6, 6).shape == (0, 3, 2)


@pytest.mark.parametrize(("stop", "missing"), [(6, 5), (8, 5), (9, 8)])
def test_row_that_was_never_written_is_an_error_that_names_it(table, stop, missing):
    table.hand_out([5, 2], step=1)
    put(table, [20, 21, 22, 23, 8], range(5), step=1)
    if missing == 8:
        put(table, [9, 10, 11], [5, 6, 7], step=1)
    message = f"expected routed experts of tokens [0, {stop}), token {missing} has none"
    with pytest.raises(MissingRoutedExpertsError, match=f"^{re.escape(message)}$"):
        table.read([5, 2], 0, stop)


def test_rows_of_the_blocks_last_owner_are_gone(table):
    table.hand_out([3], step=1)
    put(table, [12, 13, 14, 15], range(4), step=1)
    table.hand_out([3], step=2)
    with pytest.raises(MissingRoutedExpertsError, match="token 0 has none$"):
        table.read([3], 0, 4)


def test_late_row_of_the_blocks_last_owner_is_dropped(table):
    """Under async scheduling a step's rows arrive after its blocks have a new owner."""
    table.hand_out([3], step=1)
    table.hand_out([3], step=2)
    assert put(table, [12, 13], [0, 1], step=1) == 0
    with pytest.raises(MissingRoutedExpertsError, match="token 0 has none$"):
        table.read([3], 0, 1)
    assert put(table, [12, 13], [0, 1], step=2, owner=2) == 2
    assert np.array_equal(table.read([3], 0, 2), rows_of([0, 1], owner=2))


def test_padding_slots_write_nothing(table):
    table.hand_out([0, 5], step=1)
    assert put(table, [-1, 20, -1], [7, 0, 8], step=1) == 1
    assert np.array_equal(table.read([5], 0, 1), rows_of([0]))
    for block in range(BLOCKS - 1):
        with pytest.raises(MissingRoutedExpertsError):
            table.read([block], 0, 1)


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.int16)])
def test_type_of_the_table_follows_the_number_of_experts(experts, dtype):
    info = RoutedExpertsInfo(num_layers=1, moe_layers=[0], num_experts=experts, top_k=2)
    table = RoutedExpertsTable(info, BLOCKS, BLOCK)
    table.hand_out([1], step=1)
    rows = np.array([[[experts - 1, 0]]], dtype=dtype)
    table.write(StepRoutedExperts(np.array([4], dtype=np.int64), rows), 1)
    read = table.read([1], 0, 1)
    assert read.dtype == dtype and read.tolist() == [[[experts - 1, 0]]]


def test_what_was_read_does_not_change_when_its_slot_does(table):
    table.hand_out([1], step=1)
    put(table, [4, 5], [0, 1], step=1)
    read = table.read([1], 0, 2)
    put(table, [4, 5], [8, 9], step=2)
    assert np.array_equal(read, rows_of([0, 1]))
