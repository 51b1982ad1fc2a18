"""Whatever stands where in an answer, a caller sees rows or RoutesError, nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from sample_answers import full_answer, rows_of, sglang_answer, split_answer

from vllm_r3.client import RolloutRoutes, RoutesError, RouteShape, collect_stream, decode_answer

ROWS = rows_of(8)
SHAPE = RouteShape(num_layers=3, top_k=2, num_experts=16)
JUNK = [None, True, 0, -1, 1.5, 10**30, "x", "AAAA", [], [[]], [None], {}, {"a": 1}, [[["x"]]]]
FORMS = {
    "split": split_answer(ROWS, 5),
    "lists": split_answer(ROWS, 5, encode=lambda rows: rows.tolist()),
    "full": full_answer(ROWS, 5) | {"usage": {"prompt_tokens": 5, "completion_tokens": 4}},
    "versions": split_answer(
        ROWS, 5, weight_versions=[{"version": "a", "start": 0, "end": 4}], prompt_token_ids=[1] * 5
    ),
    "sglang": sglang_answer(ROWS, 5),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of an answer, but not each number of its lists."""
    yield path
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def with_junk(answer: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    changed = copy.deepcopy(answer)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = junk
    return changed


@pytest.mark.parametrize("form", FORMS)
def test_junk_anywhere_gives_rows_or_the_one_error(form: str) -> None:
    answer = FORMS[form]
    refused = 0
    for path in places(answer):
        for junk in JUNK:
            changed = with_junk(answer, path, junk)
            for call in (
                lambda answer: decode_answer(answer, num_prompt=5, shape=SHAPE),
                lambda answer: decode_answer(answer),
                lambda answer: RolloutRoutes(SHAPE).add_turn(list(range(5)), answer),
                lambda answer: decode_answer(collect_stream([answer]), shape=SHAPE),
            ):
                try:
                    call(changed)
                except RoutesError:
                    refused += 1
                except Exception as error:
                    pytest.fail(f"{form}: {junk!r} at {path}: {error!r}")
    assert refused > 100
