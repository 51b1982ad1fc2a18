"""The judge itself: it accepts what is right in any order and finds each kind of fault."""

from __future__ import annotations

import re

import numpy as np
import pytest

from vllm_r3.checks.rows import Compared, RowsDiffer, compare_rows

N, L, K, E = 6, 5, 4, 16
MOE = [1, 2, 4]


@pytest.fixture
def truth() -> np.ndarray:
    """Ids depend on row and layer, so that no shift can hide."""
    rows = np.zeros((N, L, K), dtype=np.int64)
    for row in range(N):
        for layer in MOE:
            rows[row, layer] = [(row + 5 * layer + step * (1 + row % 2)) % E for step in range(K)]
    return rows


def found(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.uint8)


def test_equal_rows_are_accepted_and_counted(truth):
    assert compare_rows(found(truth), truth, MOE, E) == Compared(rows=6, cells=18)


def test_the_order_inside_a_cell_does_not_matter(truth):
    assert compare_rows(found(truth[..., ::-1]), truth, MOE, E).cells == 18


def test_no_rows_are_equal_to_no_rows():
    empty = np.zeros((0, L, K), dtype=np.uint8)
    assert compare_rows(empty, empty.astype(np.int64), MOE, E) == Compared(0, 0)


def shifted_by_one_token(rows):
    return np.roll(rows, 1, axis=0)


def two_tokens_swapped(rows):
    return rows[[0, 2, 1, 3, 4, 5]]


def two_layers_swapped(rows):
    return rows[:, [0, 2, 1, 3, 4]]


def last_row_repeated(rows):
    rows[3:] = rows[3]
    return rows


def one_id_changed(rows):
    rows[5, 4, 0] = next(i for i in range(E) if i not in rows[5, 4])
    return rows


@pytest.mark.parametrize(
    "spoil",
    [
        shifted_by_one_token,
        two_tokens_swapped,
        two_layers_swapped,
        last_row_repeated,
        one_id_changed,
    ],
)
def test_rows_that_look_right_but_are_not_are_refused(truth, spoil):
    with pytest.raises(RowsDiffer, match=r"row \d+, layer [124]: expected experts"):
        compare_rows(spoil(found(truth)), truth, MOE, E)


def test_message_names_the_first_cell_both_sets_and_the_extent(truth):
    wrong = found(truth)
    wrong[3, 2] = [0, 1, 2, 3]
    wrong[4, 4] = [0, 1, 2, 3]
    margins = np.full((N, L), 0.25, dtype=np.float32)
    message = (
        "answer: row 3, layer 2: expected experts [1, 3, 13, 15], got [0, 1, 2, 3] "
        "(margin 2.50e-01); 2 of 18 cells differ, in 2 of 6 rows"
    )
    with pytest.raises(RowsDiffer, match=f"^{re.escape(message)}$"):
        compare_rows(wrong, truth, MOE, E, "answer", margins)


def test_all_zero_rows_are_refused_as_repeated_ids(truth):
    message = (
        "rows: row 0, layer 1: expected 4 different ids in [0, 16), got [0, 0, 0, 0]; "
        "18 cells are like this"
    )
    with pytest.raises(RowsDiffer, match=f"^{re.escape(message)}$"):
        compare_rows(found(truth * 0), truth, MOE, E)


def test_repeated_ids_are_refused_even_where_the_truth_repeats_them(truth):
    truth[2, 4] = 7
    with pytest.raises(RowsDiffer, match="row 2, layer 4: expected 4 different ids"):
        compare_rows(found(truth), truth, MOE, E)


@pytest.mark.parametrize("bad", [E, 255])
def test_ids_out_of_range_are_refused(truth, bad):
    wrong = found(truth)
    wrong[1, 1, 0] = bad
    with pytest.raises(RowsDiffer, match=r"row 1, layer 1: expected 4 different ids in \[0, 16\)"):
        compare_rows(wrong, truth, MOE, E)


def test_anything_in_a_dense_layer_is_refused(truth):
    wrong = found(truth)
    wrong[2, 3] = [0, 0, 9, 0]
    message = "rows: row 2, layer 3 is dense: expected zeros, got [0, 0, 9, 0]"
    with pytest.raises(RowsDiffer, match=f"^{re.escape(message)}$"):
        compare_rows(wrong, truth, MOE, E)


@pytest.mark.parametrize("count", [N - 1, N + 1])
def test_one_row_too_few_or_too_many_is_refused(truth, count):
    message = f"rows: expected rows (6, 5, 4), got ({count}, 5, 4)"
    with pytest.raises(RowsDiffer, match=f"^{re.escape(message)}$"):
        compare_rows(np.resize(found(truth), (count, L, K)), truth, MOE, E)


@pytest.mark.parametrize(
    ("experts", "right", "wrong"), [(256, "uint8", "int16"), (257, "int16", "uint8")]
)
def test_the_type_must_follow_the_number_of_experts(truth, experts, right, wrong):
    compare_rows(truth.astype(right), truth, MOE, experts)
    message = f"rows: expected {right} for {experts} experts, got {wrong}"
    with pytest.raises(RowsDiffer, match=f"^{re.escape(message)}$"):
        compare_rows(truth.astype(wrong), truth, MOE, experts)


@pytest.mark.parametrize("name", ["int32", "uint16", "int64"])
def test_other_types_are_refused(truth, name):
    with pytest.raises(RowsDiffer, match=f"expected uint8 for 16 experts, got {name}"):
        compare_rows(truth.astype(name), truth, MOE, E)
