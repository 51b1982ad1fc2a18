"""Every form of the field decodes to the same array; every misfit is refused with numbers."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from sample_answers import (
    bare,
    full_answer,
    meta,
    nested,
    npy,
    refused,
    rows_of,
    sglang_answer,
    split_answer,
)

from vllm_r3.client import ChoiceRoutes, RoutesError, RouteShape, decode_answer, decode_choice
from vllm_r3.client import dtype_for as rule
from vllm_r3.client.npy import decode_segment
from vllm_r3.errors import R3Error

PROMPT, TOKENS = 5, 9
ROWS = rows_of(TOKENS - 1)
SHAPE = RouteShape(num_layers=3, top_k=2, num_experts=16)

# np.save of np.arange(6, dtype=uint8).reshape(1, 3, 2), spelled out: pins the wire form
PINNED = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDEsIDMsIDIpLCB9ICAgICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAQIDBAU="
)


def with_rows(value: Any, **more: Any) -> dict[str, Any]:
    """A full answer whose choice holds this instead of its rows."""
    answer = full_answer(ROWS, PROMPT)
    answer["choices"][0].update({"routed_experts": value, **more})
    return answer


def decoded(value: Any, **shape: Any) -> ChoiceRoutes:
    return decode_choice(with_rows(value), num_prompt=PROMPT, shape=RouteShape(**shape))


@pytest.mark.parametrize(
    "answer",
    [
        split_answer(ROWS, PROMPT),
        split_answer(ROWS, PROMPT, encode=nested),
        full_answer(ROWS, PROMPT),
        sglang_answer(ROWS, PROMPT),
        [sglang_answer(ROWS, PROMPT)],
    ],
    ids=["split-npy", "split-list", "full-npy", "sglang", "sglang-n"],
)
def test_every_form_decodes_to_the_same_rows(answer: object, decoder: str) -> None:
    routes = decode_choice(answer, num_prompt=PROMPT, shape=SHAPE)
    np.testing.assert_array_equal(routes.rows, ROWS)
    assert routes.rows.dtype == np.uint8
    assert routes.rows.flags.writeable and routes.rows.flags.c_contiguous


def test_the_wire_form_is_pinned(decoder: str) -> None:
    array = decode_segment(PINNED, "here")
    assert array.shape == (1, 3, 2) and array.dtype == np.uint8
    assert array.tolist() == [[[0, 1], [2, 3], [4, 5]]]


@pytest.mark.parametrize("start", [0, 1, PROMPT - 1, PROMPT], ids=["0", "1", "P-1", "P"])
@pytest.mark.parametrize("form", [split_answer, full_answer, sglang_answer])
def test_rows_from_a_start_are_the_tail_of_all_rows(form, start: int) -> None:
    answer = form(ROWS, PROMPT, start=start)
    routes = decode_choice(answer, num_prompt=PROMPT, start=start, shape=SHAPE)
    np.testing.assert_array_equal(routes.rows, ROWS[start:])
    assert routes.count.rows == TOKENS - 1 - start


@pytest.mark.parametrize("start", [-1, PROMPT + 1])
def test_a_start_outside_the_prompt_is_refused_with_its_range(start: int) -> None:
    with refused(f"request req-1, choice 0: start must be in [0, 5], got {start}"):
        decode_choice(full_answer(ROWS, PROMPT), num_prompt=PROMPT, start=start)


@pytest.mark.parametrize(
    ("answer", "known", "message"),
    [
        (
            split_answer(ROWS, PROMPT, start=1),
            dict(num_prompt=PROMPT, start=2),
            "request req-1, choice 0: expected rows from start 2, the answer says start 1",
        ),
        (
            split_answer(ROWS, PROMPT),
            dict(num_prompt=PROMPT, shape=RouteShape(top_k=4)),
            "req-1: expected top_k 4, got 2",
        ),
        (
            sglang_answer(ROWS, PROMPT),
            dict(num_prompt=6, shape=SHAPE),
            "request sg-1, choice 0: expected 6 prompt tokens, the answer says 5",
        ),
    ],
    ids=["start", "model", "prompt"],
)
def test_what_the_answer_says_must_agree_with_the_caller(answer, known, message) -> None:
    with refused(message):
        decode_choice(answer, **known)


@pytest.mark.parametrize(
    "empty", [None, [], npy(np.zeros((0, 3, 2), np.uint8)), ""], ids=["null", "[]", "npy", "text"]
)
@pytest.mark.parametrize("side", ["prompt", "generated", "both"])
def test_an_empty_segment_on_either_side_is_legal(side: str, empty: object) -> None:
    prompt, start = {"prompt": (5, 5), "generated": (8, 0), "both": (8, 8)}[side]
    answer = split_answer(ROWS, prompt, start=start)
    if side != "generated":
        answer["prompt_routed_experts"] = empty
    if side != "prompt":
        answer["choices"][0]["routed_experts"] = empty
    routes = decode_choice(answer, num_prompt=prompt, start=start)
    np.testing.assert_array_equal(routes.rows, ROWS[start:])
    assert routes.rows.shape == (8 - start, 3, 2)


def test_no_token_generated_needs_no_row_of_the_last_prompt_token() -> None:
    answer = split_answer(ROWS[:4], 4)
    answer["choices"][0].update(token_ids=[], routed_experts=[])
    routes = decode_choice(answer, num_prompt=5)
    assert routes.count.rows == 4
    np.testing.assert_array_equal(routes.rows, ROWS[:4])


@pytest.mark.parametrize(
    ("prompt", "generated"),
    [(PROMPT - 1, 3), (PROMPT + 1, 3), (PROMPT, 2), (PROMPT, 4), (PROMPT - 1, 4)],
    ids=["prompt-short", "prompt-long", "generated-short", "generated-long", "shifted"],
)
def test_a_wrong_row_count_is_refused_on_the_side_it_is(prompt: int, generated: int) -> None:
    answer = split_answer(ROWS, PROMPT)
    answer["prompt_routed_experts"] = npy(rows_of(prompt))
    answer["choices"][0]["routed_experts"] = npy(rows_of(generated))
    rows, expected = prompt + generated, "request req-1, choice 0: expected rows (8, 3, 2)"
    with refused(
        f"{expected} (prompt 5 + generated 3) for 9 tokens from start 0, got ({rows}, 3, 2) "
        f"(prompt {prompt} + generated {generated})"
    ):
        decode_choice(answer, num_prompt=PROMPT)
    if rows != TOKENS - 1:
        with refused(f"{expected} for 9 tokens from start 0, got ({rows}, 3, 2)"):
            decoded(npy(rows_of(rows)))


@pytest.mark.parametrize(("layers", "top_k"), [(3, 1), (3, 3), (2, 2), (4, 2)])
def test_rows_of_another_model_are_refused(layers: int, top_k: int) -> None:
    hint = "; a server that sends MoE layers only needs moe_layers given" if layers != 3 else ""
    with refused(
        "request req-1, choice 0: expected 3 layers and top_k 2, got shape "
        f"(8, {layers}, {top_k}){hint}"
    ):
        decoded(npy(rows_of(8, layers, top_k)), num_layers=3, top_k=2)


@pytest.mark.parametrize(
    ("experts", "dtype"), [(1, np.uint8), (256, np.uint8), (257, np.int16), (32768, np.int16)]
)
def test_the_dtype_follows_the_number_of_experts(experts: int, dtype: type) -> None:
    assert rule(experts) == dtype


@pytest.mark.parametrize("experts", [0, 32769])
@pytest.mark.parametrize("call", [rule, lambda experts: RouteShape(num_experts=experts)])
def test_a_number_of_experts_without_a_dtype_is_refused(call, experts: int) -> None:
    with refused(f"num_experts must be in [1, 32768], got {experts}"):
        call(experts)


@pytest.mark.parametrize(
    ("sent", "experts", "got"),
    [
        (np.uint8, 256, np.uint8),
        (np.int16, 256, np.uint8),
        (np.uint16, 257, np.int16),
        (np.int32, 257, np.int16),
        (np.uint16, None, np.int16),
        (np.uint8, None, np.uint8),
        (np.int16, None, np.int16),
        (">i4", None, np.int16),
    ],
)
def test_wider_and_foreign_dtypes_come_out_by_the_rule(sent, experts, got) -> None:
    rows = rows_of(8, experts=experts or 16)
    found = decoded(npy(rows.astype(sent)), num_experts=experts).rows
    assert found.dtype == got
    np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize(
    ("bad", "experts", "limit"),
    [(16, 16, 16), (255, 255, 255), (256, 256, 256)]
    + [(-1, 16, 16), (-1, None, 32768), (32768, None, 32768)],
)
def test_an_id_out_of_range_is_refused_with_its_place(bad, experts, limit) -> None:
    rows = rows_of(8).astype(np.int32)
    rows[6, 1, 0] = bad
    with refused(
        f"request req-1, choice 0: expected expert ids in [0, {limit}), got {bad} at row 6, layer 1"
    ):
        decoded(npy(rows), num_experts=experts)


@pytest.mark.parametrize("experts", [16, 256, 257])
def test_the_last_id_is_in_range(experts: int) -> None:
    rows = rows_of(8).astype(np.int32)
    rows[6, 1, 0] = experts - 1
    assert decoded(npy(rows), num_experts=experts).rows[6, 1, 0] == experts - 1


def test_moe_layers_only_rows_land_on_their_global_layers() -> None:
    rows = rows_of(8, layers=2).astype(np.int16)
    answer = {
        "id": "cmpl-1",
        "prompt_routed_experts": rows[:PROMPT].tolist(),
        "usage": {"prompt_tokens": PROMPT, "completion_tokens": TOKENS - PROMPT},
        "choices": [{"finish_reason": "stop", "routed_experts": rows[PROMPT:].tolist()}],
    }
    shape = RouteShape(num_layers=4, top_k=2, num_experts=16, moe_layers=(1, 3))
    routes = decode_choice(answer, shape=shape)
    assert routes.rows.shape == (8, 4, 2)
    np.testing.assert_array_equal(routes.rows[:, [1, 3]], rows)
    assert not routes.rows[:, [0, 2]].any()


def test_a_completions_answer_with_two_prompts_reads_each_choices_own_prompt() -> None:
    first, second = rows_of(6), rows_of(8, first=20)
    parts = [
        {
            "index": index,
            "token_ids": [7] * (len(rows) + 1 - prompt),
            "prompt_token_ids": [1] * prompt,
            "prompt_routed_experts": npy(rows[:prompt]),
            "routed_experts": npy(rows[prompt:]),
            "finish_reason": "length",
        }
        for index, (rows, prompt) in enumerate([(first, 4), (second, 5)])
    ]
    answer = {"id": "cmpl-2", "choices": parts, "routed_experts_meta": meta(first)}
    one, two = decode_answer(answer)
    np.testing.assert_array_equal(one.rows, first)
    np.testing.assert_array_equal(two.rows, second)
    with refused("cmpl-2: expected num_prompt for each of 2 choices, got 1"):
        decode_answer(answer, num_prompt=[4])


def test_two_choices_share_the_prompts_rows() -> None:
    answer, other = split_answer(ROWS, PROMPT), rows_of(10, first=40)
    part = {"index": 1, "token_ids": [1] * 6, "routed_experts": npy(other[5:])}
    answer["choices"].append(part | {"finish_reason": "stop"})
    one, two = decode_answer(answer, num_prompt=PROMPT)
    np.testing.assert_array_equal(one.rows, ROWS)
    np.testing.assert_array_equal(two.rows, np.concatenate([ROWS[:5], other[5:]]))


@pytest.mark.parametrize("name", ["sglext", "sgl_ext"])
def test_sglangs_openai_extension_is_read_for_the_first_choice_only(name: str) -> None:
    usage = {"prompt_tokens": PROMPT, "completion_tokens": 4}
    choice = {"index": 0, "finish_reason": "length"}
    rows = {name: {"routed_experts": bare(ROWS)}}
    answer = {"id": "chat-1", "usage": usage, "choices": [choice], **rows}
    np.testing.assert_array_equal(decode_choice(answer, shape=SHAPE).rows, ROWS)
    answer["choices"] = [{**choice, "index": index, "token_ids": [1] * 4} for index in (0, 1)]
    message = r"^request chat-1, choice 1: expected 8 rows .* got none: "
    with pytest.raises(RoutesError, match=message):
        decode_answer(answer, num_prompt=PROMPT, shape=SHAPE)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (RouteShape(), "48 values came without a shape: give num_layers and top_k to read them"),
        (RouteShape(num_layers=5, top_k=2), "expected a multiple of 5 x 2 values, got 48"),
    ],
)
def test_a_headerless_buffer_needs_the_models_own_sides(shape: RouteShape, message: str) -> None:
    with refused(f"request sg-1, choice 0: {message}"):
        decode_choice(sglang_answer(ROWS, PROMPT), shape=shape)


def test_missing_rows_name_the_flag() -> None:
    with refused(
        "request req-1, choice 0: expected 8 rows for 9 tokens from start 0, got none: start the "
        "server with --enable-return-routed-experts and leave return_routed_experts unset or true"
    ):
        decoded(None)


@pytest.mark.parametrize("reason", ["abort", {"type": "abort"}])
def test_an_abort_without_rows_is_legal_and_says_so(reason: object) -> None:
    routes = decode_choice(with_rows(None, finish_reason=reason, token_ids=[]), num_prompt=PROMPT)
    assert routes.rows is None
    assert routes.note == "request req-1, choice 0: aborted after 0 tokens, without rows"


def test_an_error_answer_is_refused_with_its_message() -> None:
    with refused("answer: expected an answer with choices, got the error 'no such model'"):
        decode_answer({"error": {"message": "no such model", "code": 404}})
    with refused("answer: expected a JSON object, got str"):
        decode_answer("Not Found")


RAW = base64.b64decode(npy(ROWS))
NO_BASE64 = r"expected padded base64, got \d+ characters: .*"
NO_HEADER = "expected an npy header of format 1.0 or 2.0, got another: .*"
NO_LISTS = r"expected lists of equal length \[rows\]\[layers\]\[top_k\], got ragged ones"


def encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def npy_with(header: str, body: bytes = b"") -> str:
    padded = header.encode().ljust(117) + b"\n"
    return encoded(RAW[:8] + len(padded).to_bytes(2, "little") + padded + body)


def described(descr: str, shape: str, body: bytes = b"") -> str:
    return npy_with(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}", body)


DAMAGED = {
    "cut-base64": (npy(ROWS)[:-3], NO_BASE64),
    "bad-character": (npy(ROWS)[:40] + "*" + npy(ROWS)[41:], NO_BASE64),
    "url-alphabet": (npy(ROWS).replace("k05V", "k-_V", 1), NO_BASE64),
    **{
        f"base64 {text!r}": (text, NO_BASE64)
        for text in ("AAA", "AAAAA", "A===", "====", "AA=A", "AA==AAAA", "AAAA*AAA", "AAA\n")
        + ("AAAA AAA", "é" * 4)
    },
    "cut-at-four": (npy(ROWS)[:-8], r"expected 48 bytes for \(8, 3, 2\) uint8, got 43"),
    "trailing": (encoded(RAW + b"\0"), r"expected 48 bytes for \(8, 3, 2\) uint8, got 49"),
    "huge-header": (encoded(RAW[:8] + b"\xff\xff" + RAW[10:]), NO_HEADER),
    "format 0.0": (encoded(RAW[:6] + b"\x00\x00" + RAW[8:]), NO_HEADER),
    "format 3.0": (encoded(RAW[:6] + b"\x03\x00" + RAW[8:]), NO_HEADER),
    **{f"cut at {cut}": (encoded(RAW[:cut]), NO_HEADER) for cut in (6, 7, 8, 9, 30)},
    "code": (npy_with("__import__('os').system('true')"), NO_HEADER),
    "brackets": (npy_with("((("), NO_HEADER),
    "pickled": (
        described("|O", "(1, 1, 1)", b"cos\nsystem\n."),
        "expected integers, got a pickled.*",
    ),
    "oversized": (
        described("|u1", "(99999999999, 48, 8)", b"1234"),
        r"expected 38399999999616 bytes for \(99999999999, 48, 8\) uint8, got 4",
    ),
    "negative": (described("|u1", "(-1, 48, 0)"), r"expected 0 bytes for \(-1, 48, 0\) .*, got 0"),
    "neither": (encoded(b"12345"), "expected an npy blob or int32 values, got 5 bytes .*"),
    "ragged": ([[[1, 2]], [[1]]], NO_LISTS),
    "ragged layers": ([[[1]], [[1], [2]]], NO_LISTS),
    "null inside": ([[[1, None]]], NO_LISTS),
}


@pytest.mark.filterwarnings("ignore:Reading `.npy` or `.npz` file required additional header")
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_or_hostile_field_is_refused(kind: str, decoder: str) -> None:
    value, message = DAMAGED[kind]
    message = f"^request req-1, choice 0, routed_experts: {message}$"
    with pytest.raises(RoutesError, match=message):
        decoded(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[[0.5, 1.0]]], "expected integer expert ids, got dtype float64"),
        ([[["1", "2"]]], "expected integer expert ids, got dtype <U1"),
        ([[[True]]], "expected integer expert ids, got dtype bool"),
        ([[1, 2], [3, 4]], "expected rows (rows, L, K), got shape (2, 2)"),
    ],
)
def test_what_is_no_array_of_ids_is_refused(value: list, message: str) -> None:
    with refused(f"request req-1, choice 0: {message}"):
        decoded(value)


def test_read_only_strided_and_fortran_arrays_come_out_writable_and_contiguous() -> None:
    read_only = ROWS.copy()
    read_only.flags.writeable = False
    strided, fortran = np.concatenate([ROWS, ROWS])[::2][:8], np.asfortranarray(ROWS)
    for value in (read_only, strided, fortran, npy(fortran)):
        rows = decoded(value).rows
        np.testing.assert_array_equal(rows, strided if value is strided else ROWS)
        assert rows.flags.writeable and rows.flags.c_contiguous


def test_row_versions_follow_the_pass_that_computed_each_row() -> None:
    spans = [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 4}]
    answer = with_rows(npy(ROWS), weight_versions=spans)
    versions = decode_choice(answer, num_prompt=PROMPT).versions
    # generated token j was sampled by the pass of row P + j - 1
    assert versions == ["a"] * 4 + ["a", "a"] + ["b", "b"]
    assert decode_choice(sglang_answer(ROWS, PROMPT), shape=SHAPE).versions == ["7"] * 8
    assert decode_choice(full_answer(ROWS, PROMPT), num_prompt=PROMPT).versions is None


def test_every_error_is_the_one_users_type() -> None:
    assert issubclass(RoutesError, R3Error)


def with_runs(runs: Any, own: Any = None, start: int = 0) -> dict[str, Any]:
    answer = with_rows(npy(ROWS[start:]))
    answer["routed_experts_meta"] = {"start": start, "weight_versions": runs}
    if own is not None:
        answer["choices"][0]["routed_experts_weight_versions"] = own
    return answer | {"weight_version": "z"}


@pytest.mark.parametrize(
    ("answer", "versions"),
    [
        (with_runs([[0, "a"]]), "aaaaaaaa"),
        (with_runs([[0, "a"], [5, "b"], [7, "a"]]), "aaaaabba"),
        (with_runs([[2, "a"], [5, "b"]], start=2), "aaabbb"),
        (with_runs([[0, "a"]], own=[[0, "a"], [1, "b"]]), "abbbbbbb"),
        (with_runs([[0, "a"], [7, "b"], [30, "c"]]), "aaaaaaab"),
    ],
)
def test_versions_by_row_come_from_the_runs(answer: dict, versions: str) -> None:
    assert decode_choice(answer, num_prompt=PROMPT).versions == list(versions)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "whose first rows rise from 0, got []"),
        ([[1, "a"]], "whose first rows rise from 0, got [1]"),
        ([[0, "a"], [4, "b"], [4, "c"]], "whose first rows rise from 0, got [0, 4, 4]"),
        ([[0, "a"], [4, "b"], [2, "c"]], "whose first rows rise from 0, got [0, 4, 2]"),
        ([["0", "a"]], "[[first row, version], …], got [['0', 'a']]"),
        ([[0, 1]], "[[first row, version], …], got [[0, 1]]"),
        ([[0]], "[[first row, version], …], got [[0]]"),
        ({"0": "a"}, "[[first row, version], …], got {'0': 'a'}"),
    ],
)
def test_runs_that_do_not_fit_the_rows_are_refused(runs: Any, message: str) -> None:
    with refused(f"request req-1, choice 0: expected weight_versions {message}"):
        decode_choice(with_runs(runs), num_prompt=PROMPT)
