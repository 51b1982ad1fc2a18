"""A rollout grows over turns, aborts and resumes, and ends in exactly the trainer's shape."""

from __future__ import annotations

import numpy as np
import pytest
from sample_answers import full_answer, npy, refused, rows_of, split_answer

from vllm_r3.client import (
    RolloutRoutes,
    RouteShape,
    StreamedAnswer,
    collect_stream,
    decode_choice,
)

ALL = rows_of(40)


def tokens_to(count: int) -> list[int]:
    """Token i is 100 + i, as the made answers continue their prompts."""
    return list(range(100, 100 + count))


def answer_to(total: int, prompt: int, start: int) -> dict:
    return split_answer(ALL[: total - 1], prompt, start=start)


def started() -> RolloutRoutes:
    """A rollout that holds nine tokens after its first turn."""
    rollout = RolloutRoutes()
    rollout.add_turn(tokens_to(5), answer_to(9, 5, 0))
    return rollout


def test_three_turns_with_prefix_omission_equal_one_pass() -> None:
    rollout = RolloutRoutes()
    for prompt, total in [(5, 9), (12, 15), (15, 20)]:
        start = rollout.next_start
        turn = rollout.add_turn(tokens_to(prompt), answer_to(total, prompt, start), start=start)
        assert turn.rows == total - 1 - start
        assert rollout.next_start == len(rollout.tokens) - 1
    rows = rollout.finish(tokens_to(20))
    np.testing.assert_array_equal(rows, ALL[:19])
    assert [turn.start for turn in rollout.turns] == [0, 8, 14]


def test_a_start_one_past_the_held_rows_loses_the_boundary_row_and_is_refused() -> None:
    rollout = started()
    with refused(
        "rollout: 8 rows are held, so the next ones must start in [0, 8], got 9: send "
        "routed_experts_prompt_start=8"
    ):
        rollout.add_turn(tokens_to(10), answer_to(12, 10, 9), start=9)


@pytest.mark.parametrize(
    ("prompt", "total", "start"),
    [(9, 14, 0), (9, 14, 3), (9, 14, 8), (10, 12, 6), (6, 9, 5)],
    ids=["whole", "middle", "boundary", "rewritten-from-start", "shorter-prompt"],
)
def test_new_rows_replace_held_ones_from_their_start_and_double_none(
    prompt: int, total: int, start: int
) -> None:
    rollout = started()
    tokens, fresh = tokens_to(prompt), rows_of(total - 1, first=7)
    if start == 6:
        tokens[6] = 1
    rollout.add_turn(tokens, split_answer(fresh, prompt, start=start), start=start)
    assert rollout.tokens[:prompt] == tokens and len(rollout.tokens) == total
    np.testing.assert_array_equal(rollout.finish(), np.concatenate([ALL[:start], fresh[start:]]))


def test_an_abort_with_rows_is_resumed_to_the_whole() -> None:
    rollout = RolloutRoutes()
    partial = answer_to(9, 5, 0)
    partial["choices"][0]["finish_reason"] = "abort"
    rollout.add_turn(tokens_to(5), partial)
    rollout.add_turn(rollout.tokens, answer_to(16, 9, 8), start=8)
    np.testing.assert_array_equal(rollout.finish(), ALL[:15])


@pytest.mark.parametrize("generated", [0, 3])
def test_an_abort_without_rows_is_legal_says_so_and_can_be_resumed(generated: int) -> None:
    rollout = RolloutRoutes(name="sample 7")
    aborted = {
        "choices": [
            {"index": 0, "token_ids": tokens_to(5 + generated)[5:], "finish_reason": "abort"}
        ]
    }
    turn = rollout.add_turn(tokens_to(5), aborted)
    note = f"request sample 7, choice 0: aborted after {generated} tokens, without rows"
    assert turn.note == note and rollout.missing_rows == 4 + generated
    with refused(
        f"sample 7: expected {4 + generated} rows for {5 + generated} tokens, got 0 ({note}): "
        "resume from start 0, or truncate"
    ):
        rollout.finish()
    held = len(rollout.tokens)
    rollout.add_turn(rollout.tokens, answer_to(12, held, 0), start=0)
    np.testing.assert_array_equal(rollout.finish(), ALL[:11])


def test_a_prompt_that_rewrites_held_tokens_before_the_start_is_refused() -> None:
    rollout = started()
    changed = tokens_to(10)
    changed[6] = 1
    with refused(
        "rollout: the prompt differs from the held tokens at position 6, before start 8: "
        "send routed_experts_prompt_start=6"
    ):
        rollout.add_turn(changed, answer_to(12, 10, 8), start=8)


@pytest.mark.parametrize(("keep", "rows"), [(0, 0), (1, 0), (6, 5), (9, 8)])
def test_truncating_keeps_one_row_less_than_tokens(keep: int, rows: int) -> None:
    rollout = started()
    rollout.truncate(keep)
    assert len(rollout.finish()) == rows == rollout.num_rows
    with refused(f"rollout: expected to keep [0, {keep}] tokens, got {keep + 1}"):
        rollout.truncate(keep + 1)


def test_finishing_with_other_tokens_is_refused_with_the_first_difference() -> None:
    rollout = started()
    with refused("rollout: expected the rollout's 9 tokens, got 10 that differ from position 9"):
        rollout.finish(tokens_to(10))
    wrong = tokens_to(9)
    wrong[4] = 0
    with refused("rollout: expected the rollout's 9 tokens, got 9 that differ from position 4"):
        rollout.finish(wrong)


def test_a_turn_of_another_model_is_refused() -> None:
    rollout = started()
    other = full_answer(rows_of(11, layers=4), 9, start=8)
    with refused(
        "request rollout, choice 0: expected 3 layers and top_k 2, got shape (3, 4, 2); "
        "a server that sends MoE layers only needs moe_layers given"
    ):
        rollout.add_turn(tokens_to(9), other, start=8)


def test_a_turn_of_a_single_token_adds_only_the_missing_prompt_rows() -> None:
    rollout = started()
    turn = rollout.add_turn(tokens_to(9), answer_to(10, 9, 8), start=8)
    assert turn.rows == 1
    np.testing.assert_array_equal(rollout.finish(), ALL[:9])


def test_token_ids_are_needed() -> None:
    answer = answer_to(9, 5, 0)
    del answer["choices"][0]["token_ids"]
    answer["usage"] = {"prompt_tokens": 5, "completion_tokens": 4}
    with refused(
        "rollout: expected token_ids in choice 0, got none: ask with return_token_ids true"
    ):
        RolloutRoutes().add_turn(tokens_to(5), answer)


def test_versions_of_kept_rows_stay_and_of_replaced_rows_change() -> None:
    rollout = RolloutRoutes()
    first = answer_to(9, 5, 0)
    first["weight_version"] = "v1"
    rollout.add_turn(tokens_to(5), first)
    second = answer_to(12, 10, 8)
    second["choices"][0]["weight_versions"] = [{"version": "v2", "start": 0, "end": 2}]
    rollout.add_turn(tokens_to(10), second, start=8)
    assert rollout.versions == ["v1"] * 8 + ["v2"] * 3
    rollout.add_turn(tokens_to(12), answer_to(14, 12, 10), start=10)
    assert rollout.versions == ["v1"] * 8 + ["v2"] * 2 + [None] * 3


def test_an_empty_rollout_finishes_empty() -> None:
    assert RolloutRoutes(RouteShape(num_layers=3, top_k=2)).finish().shape == (0, 3, 2)


def test_a_folded_stream_decodes_like_the_whole_answer() -> None:
    whole = answer_to(9, 5, 0)
    choice = whole["choices"][0]
    head = {"request_id": "req-1", "choices": [{"index": 0, "token_ids": choice["token_ids"][:3]}]}
    tail = {**whole, "choices": [{**choice, "token_ids": choice["token_ids"][3:]}]}
    routes = decode_choice(collect_stream([head, tail]), num_prompt=5)
    np.testing.assert_array_equal(routes.rows, ALL[:8])


def test_a_stream_of_two_choices_takes_the_prompt_from_the_first_that_ends() -> None:
    whole = answer_to(9, 5, 0)
    one = {"index": 1, "token_ids": [1], "finish_reason": "stop", "routed_experts": npy(ALL[:0])}
    first = {"choices": [one], "prompt_routed_experts": whole["prompt_routed_experts"]}
    second = {"choices": whole["choices"], "routed_experts_meta": whole["routed_experts_meta"]}
    folded = collect_stream([first, second])
    assert len(decode_choice(folded, 0, num_prompt=5).rows) == 8
    assert len(decode_choice(folded, 1, num_prompt=5).rows) == 5


def test_a_stream_that_stops_early_is_refused() -> None:
    head = {"request_id": "req-1", "choices": [{"index": 0, "token_ids": [1]}]}
    with refused("req-1: the stream ended after 1 chunks without a finish_reason for choices [0]"):
        collect_stream([head])
    with refused("stream: expected chunks with choices, got none in 0 chunks"):
        collect_stream([])


def deltas(layout: str, start: int = 0) -> list[dict]:
    """Chunks for 5 prompt and 6 generated tokens: the prompt in pieces, then 1, 2 and 3 tokens."""
    meta = answer_to(9, 5, 0)["routed_experts_meta"] | {"layout": layout}
    chunks, row = [], start
    for stop, tokens in ((3, []), (5, []), (5, [5]), (7, [6, 7]), (9, []), (10, [8, 9, 10])):
        choice = {"index": 0, "finish_reason": "stop" if stop == 10 else None}
        choice |= {"token_ids": tokens} if tokens else {}
        chunk = {"request_id": "req-1", "routed_experts_meta": meta | {"start": row}}
        if layout == "split" and stop <= 5 and not tokens:
            chunk |= {"choices": [], "prompt_routed_experts": npy(ALL[row:stop])}
        else:
            chunk["choices"] = [choice | {"routed_experts": npy(ALL[row:stop])}]
        chunks.append(chunk)
        row = stop
    return chunks


@pytest.mark.parametrize("layout", ["split", "full"])
@pytest.mark.parametrize("start", [0, 2])
def test_deltas_fold_like_the_whole_answer_wherever_they_are_cut(layout: str, start: int) -> None:
    chunks = deltas(layout, start)
    routes = decode_choice(collect_stream(chunks), num_prompt=5)
    assert routes.count.start == start
    np.testing.assert_array_equal(routes.rows, ALL[start:10])
    for cut, num_tokens in enumerate((0, 0, 0, 1, 3, 3, 6)):
        stream = StreamedAnswer()
        for chunk in chunks[:cut]:
            stream.add(chunk)
        rollout = RolloutRoutes()
        if start:
            rollout.put(ALL[:start], start=0)
            rollout.tokens = tokens_to(start + 1)
        turn = rollout.add_turn(tokens_to(5), stream.answer(cut=True), start=start)
        assert (turn.generated, len(rollout.tokens)) == (num_tokens, 5 + num_tokens)
        if num_tokens:
            np.testing.assert_array_equal(rollout.finish(), ALL[: 4 + num_tokens])
        else:
            assert rollout.next_start == start and "aborted after 0 tokens" in turn.note


def test_deltas_with_a_gap_are_refused() -> None:
    head, *_, tail = deltas("split")[2:]
    with refused("request req-1, routed_experts: expected rows from 5 on in the next chunk, got 9"):
        collect_stream([head, tail])
