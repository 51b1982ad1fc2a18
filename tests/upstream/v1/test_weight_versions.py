# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Names of weights by step, and runs of rows."""

import numpy as np
import pytest

from vllm.v1.weight_versions import (
    ChoiceVersions,
    PromptVersions,
    TokenVersions,
    WeightVersions,
    clip_runs,
)


@pytest.fixture
def versions() -> WeightVersions:
    return WeightVersions()


def names(versions: WeightVersions, steps: int) -> list[str]:
    return [versions.name(versions.number_at(step)) for step in range(steps)]


def test_weights_that_nobody_has_named_are_the_default(versions: WeightVersions):
    versions.step = 5
    assert versions.current == "default"
    assert names(versions, 6) == ["default"] * 6


def test_steps_launched_before_an_update_keep_their_name(versions: WeightVersions):
    versions.step = 2
    versions.note_rpc("reload_weights")
    versions.set("v1")
    versions.step = 3
    versions.set("v2")
    assert names(versions, 5) == ["default", "default", "v1", "v2", "v2"]


def test_changed_weights_have_a_name_of_their_own_until_they_are_named(
    versions: WeightVersions,
):
    versions.set("v1")
    for method in ("update_weights", "update_weights", "finish_weight_update"):
        versions.step = 2
        versions.note_rpc(method)
    versions.step = 3
    versions.note_change()
    assert names(versions, 4) == ["v1", "v1", "v1+1", "v1+2"]
    versions.set("v2")
    versions.step = 4
    versions.note_change()
    assert names(versions, 5) == ["v1", "v1", "v1+1", "v2", "v2+1"]


def test_a_name_given_just_before_the_change_is_that_of_the_new(
    versions: WeightVersions,
):
    versions.step = 2
    versions.set("v1")
    versions.note_rpc("reload_weights")
    assert names(versions, 3) == ["default", "default", "v1"]


@pytest.mark.parametrize("method", ["start_weight_update", "get_model", len])
def test_other_calls_of_the_workers_change_nothing(versions: WeightVersions, method):
    versions.step = 2
    versions.note_rpc(method)
    assert versions.current == "default"


def test_runs_begin_where_the_name_changes(versions: WeightVersions):
    for step, name in enumerate(("a", "b", "b", "c"), 1):
        versions.set(name)
        versions.step = step
    numbers = np.array([0, 0, 1, 2, 2, 3, 0])
    assert versions.runs(numbers, 10) == [(10, "a"), (12, "b"), (15, "c"), (16, "a")]
    assert versions.runs(numbers[:0], 10) == []


RUNS = [(2, "a"), (5, "b"), (9, "c")]


@pytest.mark.parametrize(
    ("start", "stop", "clipped"),
    [
        (2, 20, RUNS),
        (3, 9, [(3, "a"), (5, "b")]),
        (5, 6, [(5, "b")]),
        (9, 10, [(9, "c")]),
        (4, 4, []),
    ],
)
def test_runs_of_a_part(start: int, stop: int, clipped: list):
    assert clip_runs(RUNS, start, stop) == clipped


def told(number: int, *runs: tuple[int, str]) -> TokenVersions:
    return TokenVersions(f"v{number}", number, list(runs))


def test_a_choice_puts_together_what_it_is_told_by_and_by():
    choice = ChoiceVersions(None, 0)
    for update in (None, told(0, (3, "a")), told(1), told(2, (7, "b"), (8, "c"))):
        choice.add(update)
    assert (choice.current, choice.number) == ("v2", 2)
    assert choice.runs(3, 10) == [(3, "a"), (7, "b"), (8, "c")]
    assert choice.runs(4, 8) == [(4, "a"), (7, "b")]


@pytest.mark.parametrize("first_to_tell", [0, 1])
def test_the_prompt_has_the_versions_of_choice_0(first_to_tell: int):
    prompt = PromptVersions(4)
    choices = [ChoiceVersions(prompt, index) for index in range(3)]
    updates = [told(1, (0, "a"), (2, "b"), (5, "c")), told(1, (0, "c")), told(1)]
    for index in (first_to_tell, 1 - first_to_tell):
        choices[index].add(updates[index])
    choices[2].add(told(2, (4, "b"), (6, "d")))
    assert choices[0].runs(0, 9) == [(0, "a"), (2, "b"), (5, "c")]
    assert choices[1].runs(1, 9) == [(1, "a"), (2, "b"), (4, "c")]
    assert choices[2].runs(0, 9) == [(0, "a"), (2, "b"), (6, "d")]
    assert choices[2].runs(4, 5) == [(4, "b")]
