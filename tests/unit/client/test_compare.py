"""`compare` puts two servers' rows side by side and finds the first difference."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fake_server import EXPERTS, LAYERS, TOP_K, serving
from sample_answers import rows_of

from vllm_r3.checks.compare import Side, compare_servers, compare_sides
from vllm_r3.checks.connect import Connection
from vllm_r3.client import ChoiceRoutes, Count, RouteShape
from vllm_r3.errors import R3Error

SHAPE = RouteShape(LAYERS, TOP_K, EXPERTS)


def test_equal_servers_agree_in_every_layer() -> None:
    with serving() as a, serving() as b:
        comparison = compare_servers(a, b, prompt_tokens=20, max_tokens=5)
    assert comparison.passed(1.0) and comparison.first is None
    assert comparison.shared == 24
    assert comparison.lines()[0].endswith("r3 0.21.0+r3.1  rows (24, 3, 2) from split base64 uint8")


def test_a_vllm_and_an_sglang_server_are_compared_in_their_own_dialects() -> None:
    with serving() as a, serving("sglang") as b:
        comparison = compare_servers(a, b, prompt_tokens=20, max_tokens=5)
    assert comparison.passed(1.0)
    assert comparison.lines()[1].endswith("sglang 0.5.23  rows (24, 3, 2) from full base64 int32")


def test_two_sglang_servers_need_the_models_sides() -> None:
    with serving("sglang") as a, serving("sglang") as b:
        with pytest.raises(R3Error, match="came without a shape: give num_layers and top_k"):
            compare_servers(a, b, prompt_tokens=20, max_tokens=5)
        assert compare_servers(a, b, prompt_tokens=20, max_tokens=5, shape=SHAPE).passed(1.0)


def test_the_first_difference_is_named_with_both_choices() -> None:
    with serving() as a, serving("r3", ("other rows",)) as b:
        comparison = compare_servers(a, b, prompt_tokens=20, max_tokens=5)
    assert comparison.first == (0, 1)
    assert not comparison.passed(1.0) and comparison.passed(0.0)
    assert comparison.agreement.tolist() == [1.0, 0.0, 0.0]
    assert re.fullmatch(
        r"first difference at row 0, layer 1: A \[\d+, \d+\], B \[\d+, \d+\]",
        comparison.lines()[-1],
    )


def side(rows: np.ndarray, tokens: list[int]) -> Side:
    routes = ChoiceRoutes(0, rows, Count(4, len(tokens)), token_ids=tokens)
    return Side(Connection("http://x"), routes, "full")


@pytest.mark.parametrize(
    ("other", "shared"),
    [([1, 2, 3, 4], 7), ([1, 2, 9, 4], 6), ([9, 2, 3, 4], 4), ([1, 2, 3, 9], 7)],
    ids=["same", "third-differs", "first-differs", "last-differs"],
)
def test_rows_count_only_as_far_as_the_tokens_are_the_same(other: list[int], shared: int) -> None:
    a, b = rows_of(7), rows_of(7)
    b[shared:] = rows_of(7 - shared, first=50)
    comparison = compare_sides(side(a, [1, 2, 3, 4]), side(b, other))
    assert comparison.shared == shared and comparison.first is None


def test_rows_of_different_models_are_refused() -> None:
    a, b = side(rows_of(7), [1] * 4), side(rows_of(7, layers=4), [1] * 4)
    expected = re.escape("expected rows of one model, got A (7, 3, 2) and B (7, 4, 2)")
    with pytest.raises(R3Error, match=f"^{expected}$"):
        compare_sides(a, b)
