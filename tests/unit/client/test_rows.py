"""The judge itself: it accepts what is right in any order and finds each kind of fault."""

from __future__ import annotations

import numpy as np
import pytest
from sample_answers import refused, rows_of

from vllm_r3.checks.rows import Compared, RowsDiffer, compare_rows, find_problems, spans
from vllm_r3.client import RouteShape

N, L, K, E = 6, 5, 4, 16
SHAPE = RouteShape(L, K, E, moe_layers=(1, 2, 4))


@pytest.fixture
def truth() -> np.ndarray:
    """Ids depend on row and layer, so that no shift can hide."""
    rows = np.zeros((N, L, K), dtype=np.int64)
    for row in range(N):
        for layer in SHAPE.moe_layers:
            rows[row, layer] = [(row + 5 * layer + step * (1 + row % 2)) % E for step in range(K)]
    return rows


def found(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.uint8)


def wrong(message: str):
    return refused(message, RowsDiffer)


def test_equal_rows_are_accepted_in_any_order_and_counted(truth):
    assert compare_rows(found(truth), truth, SHAPE) == Compared(rows=6, cells=18)
    assert compare_rows(found(truth[..., ::-1]), truth, SHAPE).cells == 18


def test_no_rows_are_equal_to_no_rows():
    empty = np.zeros((0, L, K), dtype=np.uint8)
    assert compare_rows(empty, empty.astype(np.int64), SHAPE) == Compared(0, 0)


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


SPOILERS = [shifted_by_one_token, two_tokens_swapped, two_layers_swapped, last_row_repeated]


@pytest.mark.parametrize("spoil", [*SPOILERS, one_id_changed])
def test_rows_that_look_right_but_are_not_are_refused(truth, spoil):
    with pytest.raises(RowsDiffer, match=r"^rows: row \d, layer [124]: expected experts \["):
        compare_rows(spoil(found(truth)), truth, SHAPE)


def test_message_names_the_first_cell_both_sets_and_the_extent(truth):
    rows = found(truth)
    rows[3, 2] = rows[4, 4] = [0, 1, 2, 3]
    margins = np.full((N, L), 0.25, dtype=np.float32)
    with wrong(
        "answer: row 3, layer 2: expected experts [1, 3, 13, 15], got [0, 1, 2, 3] "
        "(margin 2.50e-01); 2 of 18 cells differ, in 2 of 6 rows"
    ):
        compare_rows(rows, truth, SHAPE, "answer", margins)


@pytest.mark.parametrize(("share", "passes"), [(1 / 18, False), (2 / 18, True)])
def test_cells_may_differ_up_to_the_given_share(truth, share, passes):
    rows = found(truth)
    rows[3, 2] = rows[4, 4] = [0, 1, 2, 3]
    if passes:
        compare_rows(rows, truth, SHAPE, max_differing=share)
        return
    with pytest.raises(RowsDiffer, match="2 of 18 cells differ"):
        compare_rows(rows, truth, SHAPE, max_differing=share)


def test_impossible_rows_are_refused_even_where_the_truth_has_them(truth):
    truth[2, 4] = 7
    message = "1 cells name an expert twice, the first at row 2, layer 4: [7, 7, 7, 7]"
    with wrong(f"rows: duplicate ids: {message}"):
        compare_rows(found(truth), truth, SHAPE)


@pytest.mark.parametrize("count", [N - 1, N + 1])
def test_one_row_too_few_or_too_many_is_refused(truth, count):
    with wrong(f"rows: expected rows (6, 5, 4), got ({count}, 5, 4)"):
        compare_rows(np.resize(found(truth), (count, L, K)), truth, SHAPE)


@pytest.mark.parametrize(
    ("experts", "right", "other"),
    [(256, "uint8", "int16"), (257, "int16", "uint8")]
    + [(16, "uint8", name) for name in ("int32", "uint16", "int64")],
)
def test_the_type_must_follow_the_number_of_experts(truth, experts, right, other):
    shape = RouteShape(num_experts=experts, moe_layers=SHAPE.moe_layers)
    compare_rows(truth.astype(right), truth, shape)
    with wrong(f"rows: expected {right} for {experts} experts, got {other}"):
        compare_rows(truth.astype(other), truth, shape)


def with_value(row: int, layer: int, value: list[int]) -> np.ndarray:
    rows = rows_of(8).astype(np.int32)
    rows[row, layer] = value
    return rows


GOOD = rows_of(8).astype(np.int32)
MODEL = RouteShape(3, 2, 16)
SOME = RouteShape(3, 2, 16, moe_layers=(1, 2))
FAULTS = [
    (GOOD, MODEL, ""),
    (with_value(0, 0, [0, 15]), MODEL, ""),
    (
        with_value(6, 2, [7, 16]), MODEL,
        "out of range: 1 ids outside [0, 16), the first 16 at row 6, layer 2",
    ),
    (
        with_value(0, 0, [-1, -2]), RouteShape(),
        "out of range: 2 ids outside [0, E), the first -1 at row 0, layer 0",
    ),
    (
        with_value(6, 2, [7, 7]), MODEL,
        "duplicate ids: 1 cells name an expert twice, the first at row 6, layer 2: [7, 7]",
    ),
    (GOOD * 0, MODEL, "zero MoE layer: layers 0-2 of 3 are all zeros"),
    (
        GOOD * np.array([[[1], [0], [1]]]), MODEL,
        "zero MoE layer: layers 1 of 3 are all zeros; if these are dense, give --moe-layers",
    ),
    (
        GOOD * np.array([0, 0, 1, 1, 0, 1, 1, 1])[:, None, None], MODEL,
        "zero rows: 3 of 8 rows hold zeros: 0-1, 4",
    ),
    (GOOD * np.array([[[0], [1], [1]]]), SOME, ""),
    (GOOD, SOME, "dense layer not zero: layers 0 are not among the MoE layers, but hold ids"),
    # with one expert a token a few zeros are a choice
    (np.zeros((15, 1, 1), np.uint8), RouteShape(), ""),
    (
        np.zeros((16, 1, 1), np.uint8), RouteShape(),
        "zero MoE layer: layers 0 of 1 are all zeros",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "shape", "problems"), FAULTS)
def test_each_fault_is_named_with_its_place(rows, shape, problems):
    found = find_problems(rows, shape)
    assert "; ".join(f"{kind}: {what}" for kind, what in found.items()) == problems


def test_all_faults_are_named():
    rows = with_value(6, 2, [7, 7])
    rows[1, 0, 0] = 99
    rows[3] = 0
    assert list(find_problems(rows, MODEL)) == ["out of range", "zero rows", "duplicate ids"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "3"), ([0, 1, 2, 7], "0-2, 7"), (list(range(0, 20, 2)), "0, 2, 4, 6, 8, 10, ...")],
)
def test_numbers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text
