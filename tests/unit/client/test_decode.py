"""Every form of the field decodes to the same array; every misfit is refused with numbers."""

from __future__ import annotations

import base64
import re

import numpy as np
import pytest
from sample_answers import bare, full_answer, meta, npy, rows_of, sglang_answer, split_answer

from vllm_r3.client import (
    RoutesError,
    RouteShape,
    base64_numpy,
    decode_answer,
    decode_choice,
    dtype_for,
)
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


def nested(array: np.ndarray) -> list:
    return array.tolist()


def refused(message: str):
    return pytest.raises(RoutesError, match=f"^{re.escape(message)}$")


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
    routes = decode_choice(
        form(ROWS, PROMPT, start=start), num_prompt=PROMPT, start=start, shape=SHAPE
    )
    np.testing.assert_array_equal(routes.rows, ROWS[start:])
    assert routes.count.rows == TOKENS - 1 - start


@pytest.mark.parametrize("start", [-1, PROMPT + 1])
def test_a_start_outside_the_prompt_is_refused_with_its_range(start: int) -> None:
    with refused(f"request req-1, choice 0: start must be in [0, 5], got {start}"):
        decode_choice(full_answer(ROWS, PROMPT), num_prompt=PROMPT, start=start)


def test_a_start_other_than_the_answers_is_refused() -> None:
    with refused("request req-1, choice 0: expected rows from start 2, the answer says start 1"):
        decode_choice(split_answer(ROWS, PROMPT, start=1), num_prompt=PROMPT, start=2)


def test_one_generated_token_leaves_only_prompt_rows() -> None:
    rows = rows_of(PROMPT)
    for encode in (npy, nested):
        routes = decode_choice(split_answer(rows, PROMPT, encode=encode), num_prompt=PROMPT)
        np.testing.assert_array_equal(routes.rows, rows)


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
    answer["choices"][0]["token_ids"] = []
    answer["choices"][0]["routed_experts"] = []
    routes = decode_choice(answer, num_prompt=5)
    assert routes.count.rows == 4
    np.testing.assert_array_equal(routes.rows, ROWS[:4])


@pytest.mark.parametrize(
    ("prompt_rows", "generated_rows", "got"),
    [
        (PROMPT - 1, 3, "(7, 3, 2) (prompt 4 + generated 3)"),
        (PROMPT + 1, 3, "(9, 3, 2) (prompt 6 + generated 3)"),
        (PROMPT, 2, "(7, 3, 2) (prompt 5 + generated 2)"),
        (PROMPT, 4, "(9, 3, 2) (prompt 5 + generated 4)"),
        (PROMPT - 1, 4, "(8, 3, 2) (prompt 4 + generated 4)"),
    ],
    ids=["prompt-short", "prompt-long", "generated-short", "generated-long", "shifted"],
)
def test_a_wrong_row_count_is_refused_on_the_side_it_is(
    prompt_rows: int, generated_rows: int, got: str
) -> None:
    answer = split_answer(ROWS, PROMPT)
    answer["prompt_routed_experts"] = npy(rows_of(prompt_rows))
    answer["choices"][0]["routed_experts"] = npy(rows_of(generated_rows))
    with refused(
        "request req-1, choice 0: expected rows (8, 3, 2) (prompt 5 + generated 3) for 9 tokens "
        "from start 0, "
        f"got {got}"
    ):
        decode_choice(answer, num_prompt=PROMPT)


@pytest.mark.parametrize("rows", [TOKENS - 2, TOKENS], ids=["one-short", "one-too-many"])
def test_a_full_buffer_of_another_length_is_refused(rows: int) -> None:
    answer = full_answer(ROWS, PROMPT)
    answer["choices"][0]["routed_experts"] = npy(rows_of(rows))
    with refused(
        "request req-1, choice 0: expected rows (8, 3, 2) for 9 tokens from start 0, got "
        f"({rows}, 3, 2)"
    ):
        decode_choice(answer, num_prompt=PROMPT)


@pytest.mark.parametrize("top_k", [1, 3], ids=["one-less", "one-more"])
def test_a_top_k_off_by_one_is_refused(top_k: int) -> None:
    answer = full_answer(rows_of(8, top_k=top_k), PROMPT)
    with refused(
        f"request req-1, choice 0: expected top_k 2, got {top_k} in shape (8, 3, {top_k})"
    ):
        decode_choice(answer, num_prompt=PROMPT, shape=SHAPE)


@pytest.mark.parametrize("layers", [2, 4], ids=["one-less", "one-more"])
def test_another_layer_count_is_refused(layers: int) -> None:
    answer = full_answer(rows_of(8, layers=layers), PROMPT)
    with refused(
        f"request req-1, choice 0: expected 3 layers, got {layers} in shape (8, {layers}, 2); "
        "a server that sends MoE layers only needs moe_layers given"
    ):
        decode_choice(answer, num_prompt=PROMPT, shape=SHAPE)


def test_what_the_answer_says_of_the_model_must_agree_with_the_caller() -> None:
    with refused("req-1: expected top_k 4, got 2"):
        decode_choice(split_answer(ROWS, PROMPT), num_prompt=PROMPT, shape=RouteShape(top_k=4))


def test_prompt_tokens_must_agree_with_the_answer() -> None:
    with refused("request sg-1, choice 0: expected 6 prompt tokens, the answer says 5"):
        decode_choice(sglang_answer(ROWS, PROMPT), num_prompt=6, shape=SHAPE)


@pytest.mark.parametrize(
    ("experts", "dtype"), [(1, np.uint8), (256, np.uint8), (257, np.int16), (32768, np.int16)]
)
def test_the_dtype_follows_the_number_of_experts(experts: int, dtype: type) -> None:
    assert dtype_for(experts) == dtype


@pytest.mark.parametrize("experts", [0, 32769])
def test_a_number_of_experts_without_a_dtype_is_refused(experts: int) -> None:
    with refused(f"num_experts must be in [1, 32768], got {experts}"):
        dtype_for(experts)


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
def test_wider_and_foreign_dtypes_come_out_by_the_rule(
    sent: type, experts: int | None, got: type
) -> None:
    rows = rows_of(8, experts=experts or 16)
    answer = full_answer(rows.astype(sent), PROMPT)
    routes = decode_choice(answer, num_prompt=PROMPT, shape=RouteShape(num_experts=experts))
    assert routes.rows.dtype == got
    np.testing.assert_array_equal(routes.rows, rows)


@pytest.mark.parametrize(
    ("bad", "experts", "limit"),
    [
        (16, 16, 16),
        (255, 255, 255),
        (256, 256, 256),
        (-1, 16, 16),
        (-1, None, 32768),
        (32768, None, 32768),
    ],
)
def test_an_id_out_of_range_is_refused_with_its_place(
    bad: int, experts: int | None, limit: int
) -> None:
    rows = rows_of(8).astype(np.int32)
    rows[6, 1, 0] = bad
    with refused(
        f"request req-1, choice 0: expected expert ids in [0, {limit}), got {bad} at row 6, layer 1"
    ):
        decode_choice(
            full_answer(rows, PROMPT), num_prompt=PROMPT, shape=RouteShape(num_experts=experts)
        )


@pytest.mark.parametrize("experts", [256, 257])
def test_the_last_id_is_in_range(experts: int) -> None:
    rows = rows_of(8).astype(np.int32)
    rows[6, 1, 0] = experts - 1
    routes = decode_choice(
        full_answer(rows, PROMPT), num_prompt=PROMPT, shape=RouteShape(num_experts=experts)
    )
    assert routes.rows[6, 1, 0] == experts - 1


def test_moe_layers_only_rows_land_on_their_global_layers() -> None:
    rows = rows_of(8, layers=2).astype(np.int16)
    answer = {
        "id": "cmpl-1",
        "prompt_routed_experts": rows[:PROMPT].tolist(),
        "usage": {"prompt_tokens": PROMPT, "completion_tokens": TOKENS - PROMPT},
        "choices": [
            {"index": 0, "finish_reason": "stop", "routed_experts": rows[PROMPT:].tolist()}
        ],
    }
    shape = RouteShape(num_layers=4, top_k=2, num_experts=16, moe_layers=(1, 3))
    routes = decode_choice(answer, shape=shape)
    assert routes.rows.shape == (8, 4, 2)
    np.testing.assert_array_equal(routes.rows[:, [1, 3]], rows)
    assert not routes.rows[:, [0, 2]].any()


def test_a_completions_answer_with_two_prompts_reads_each_choices_own_prompt() -> None:
    first, second = rows_of(6), rows_of(8, first=20)
    answer = {"id": "cmpl-2", "choices": [], "routed_experts_meta": meta(first)}
    for index, (rows, prompt) in enumerate([(first, 4), (second, 5)]):
        answer["choices"].append(
            {
                "index": index,
                "token_ids": [7] * (len(rows) + 1 - prompt),
                "prompt_token_ids": [1] * prompt,
                "prompt_routed_experts": npy(rows[:prompt]),
                "routed_experts": npy(rows[prompt:]),
                "finish_reason": "length",
            }
        )
    one, two = decode_answer(answer)
    np.testing.assert_array_equal(one.rows, first)
    np.testing.assert_array_equal(two.rows, second)
    with refused("cmpl-2: expected num_prompt for each of 2 choices, got 1"):
        decode_answer(answer, num_prompt=[4])


def test_two_choices_share_the_prompts_rows() -> None:
    answer = split_answer(ROWS, PROMPT)
    other = rows_of(10, first=40)
    answer["choices"].append(
        {
            "index": 1,
            "token_ids": [1] * 6,
            "routed_experts": npy(other[5:]),
            "finish_reason": "stop",
        }
    )
    one, two = decode_answer(answer, num_prompt=PROMPT)
    np.testing.assert_array_equal(one.rows, ROWS)
    np.testing.assert_array_equal(two.rows, np.concatenate([ROWS[:5], other[5:]]))


@pytest.mark.parametrize("name", ["sglext", "sgl_ext"])
def test_sglangs_openai_extension_is_read_for_the_first_choice_only(name: str) -> None:
    usage = {"prompt_tokens": PROMPT, "completion_tokens": 4}
    choice = {"index": 0, "finish_reason": "length"}
    answer = {
        "id": "chat-1",
        "usage": usage,
        "choices": [choice],
        name: {"routed_experts": bare(ROWS)},
    }
    np.testing.assert_array_equal(decode_choice(answer, shape=SHAPE).rows, ROWS)
    answer["choices"] = [
        {**choice, "token_ids": [1] * 4},
        {**choice, "index": 1, "token_ids": [1] * 4},
    ]
    with pytest.raises(
        RoutesError, match=r"^request chat-1, choice 1: expected 8 rows .* got none: "
    ):
        decode_answer(answer, num_prompt=PROMPT, shape=SHAPE)


def test_a_headerless_buffer_needs_the_models_sides() -> None:
    with refused(
        "request sg-1, choice 0: 48 values came without a shape: give num_layers and top_k to "
        "read them"
    ):
        decode_choice(sglang_answer(ROWS, PROMPT))


def test_a_headerless_buffer_of_another_model_is_refused() -> None:
    with refused("request sg-1, choice 0: expected a multiple of 5 x 2 values, got 48"):
        decode_choice(sglang_answer(ROWS, PROMPT), shape=RouteShape(num_layers=5, top_k=2))


def test_missing_rows_name_the_flag() -> None:
    answer = full_answer(ROWS, PROMPT)
    answer["choices"][0]["routed_experts"] = None
    with refused(
        "request req-1, choice 0: expected 8 rows for 9 tokens from start 0, got none: start the "
        "server with "
        "--enable-return-routed-experts and leave return_routed_experts unset or true"
    ):
        decode_choice(answer, num_prompt=PROMPT)


@pytest.mark.parametrize("reason", ["abort", {"type": "abort"}])
def test_an_abort_without_rows_is_legal_and_says_so(reason: object) -> None:
    answer = full_answer(ROWS, PROMPT)
    answer["choices"][0].update(routed_experts=None, finish_reason=reason, token_ids=[])
    routes = decode_choice(answer, num_prompt=PROMPT)
    assert routes.rows is None
    assert routes.note == "request req-1, choice 0: aborted after 0 tokens, without rows"


def test_an_error_answer_is_refused_with_its_message() -> None:
    with refused("answer: expected an answer with choices, got the error 'no such model'"):
        decode_answer({"error": {"message": "no such model", "code": 404}})
    with refused("answer: expected a JSON object, got str"):
        decode_answer("Not Found")


def corrupt(text: str, kind: str) -> str:
    raw = bytearray(base64.b64decode(text))
    if kind == "cut-base64":
        return text[:-3]
    if kind == "cut-at-four":
        return text[:-8]
    if kind == "bad-character":
        return text[:40] + "*" + text[41:]
    if kind == "url-alphabet":
        return text.replace("k05V", "k-_V", 1)
    if kind == "trailing":
        return base64.b64encode(bytes(raw) + b"\0").decode()
    if kind == "huge-header":
        raw[8:10] = (65535).to_bytes(2, "little")
        return base64.b64encode(bytes(raw)).decode()
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut-base64", r"expected padded base64, got \d+ characters.*"),
        ("cut-at-four", r"expected 48 bytes for \(8, 3, 2\) uint8, got \d+"),
        ("bad-character", r"expected padded base64, got \d+ characters.*"),
        ("url-alphabet", r"expected padded base64, got \d+ characters.*"),
        ("trailing", r"expected 48 bytes for \(8, 3, 2\) uint8, got 49"),
        ("huge-header", r"expected an npy header of at most 4096 bytes, got 65535"),
    ],
)
def test_a_damaged_blob_is_refused(kind: str, message: str, decoder: str) -> None:
    answer = full_answer(ROWS, PROMPT)
    answer["choices"][0]["routed_experts"] = corrupt(npy(ROWS), kind)
    with pytest.raises(RoutesError, match=f"^request req-1, choice 0, routed_experts: {message}$"):
        decode_choice(answer, num_prompt=PROMPT)


def npy_with(header: bytes, body: bytes = b"") -> str:
    padded = header.ljust(117) + b"\n"
    return base64.b64encode(
        b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + body
    ).decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            npy_with(
                b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 1), }", b"cos\nsystem\n."
            ),
            "here: expected integers, got a pickled npy (dtype object), which is never loaded",
        ),
        (
            npy_with(
                b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 48, 8), }",
                b"1234",
            ),
            "here: expected 38399999999616 bytes for (99999999999, 48, 8) uint8, got 4",
        ),
        (
            npy_with(b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 48, 8), }", b""),
            "here: expected sides of 0 or more, got (-1, 48, 8)",
        ),
    ],
    ids=["pickled", "oversized", "negative"],
)
def test_a_hostile_npy_is_refused(text: str, message: str) -> None:
    with refused(message):
        decode_segment(text, "here")


def test_a_header_that_is_code_is_not_run() -> None:
    with pytest.raises(
        RoutesError, match=r"^here: expected an npy header, got an unreadable one: "
    ):
        decode_segment(npy_with(b"__import__('os').system('true')"), "here")


@pytest.mark.parametrize("version", [b"\x00\x00", b"\x03\x00"])
def test_another_npy_format_is_refused(version: bytes) -> None:
    raw = base64.b64decode(npy(ROWS))
    text = base64.b64encode(raw[:6] + version + raw[8:]).decode()
    with pytest.raises(RoutesError, match=r"^here: expected npy format 1.0 or 2.0, got "):
        decode_segment(text, "here")


@pytest.mark.parametrize("cut", [6, 7, 8, 9, 30])
def test_an_npy_cut_inside_its_header_is_refused(cut: int) -> None:
    text = base64.b64encode(base64.b64decode(npy(ROWS))[:cut]).decode()
    with pytest.raises(RoutesError, match=r"^here: expected "):
        decode_segment(text, "here")


def test_bytes_that_are_neither_npy_nor_int32_are_refused() -> None:
    with refused("here: expected an npy blob or int32 values, got 5 bytes that are neither"):
        decode_segment(base64.b64encode(b"12345").decode(), "here")


@pytest.mark.parametrize("ragged", [[[[1, 2]], [[1]]], [[[1]], [[1], [2]]], [[[1, None]]]])
def test_ragged_lists_are_refused(ragged: list) -> None:
    with refused("here: expected lists of equal length [rows][layers][top_k], got ragged ones"):
        decode_segment(ragged, "here")


@pytest.mark.parametrize(
    ("value", "dtype"), [([[[0.5, 1.0]]], "float64"), ([[["1", "2"]]], "<U1"), ([[[True]]], "bool")]
)
def test_ids_that_are_no_integers_are_refused(value: list, dtype: str) -> None:
    answer = full_answer(ROWS, PROMPT)
    answer["choices"][0]["routed_experts"] = value
    with refused(f"request req-1, choice 0: expected integer expert ids, got dtype {dtype}"):
        decode_choice(answer, num_prompt=PROMPT)


def test_a_flat_list_is_refused_where_rows_belong() -> None:
    answer = full_answer(ROWS, PROMPT)
    answer["choices"][0]["routed_experts"] = [[1, 2], [3, 4]]
    with refused("request req-1, choice 0: expected rows [rows, layers, top_k], got shape (2, 2)"):
        decode_choice(answer, num_prompt=PROMPT)


def test_read_only_strided_and_fortran_arrays_come_out_writable_and_contiguous() -> None:
    read_only = ROWS.copy()
    read_only.flags.writeable = False
    strided = np.concatenate([ROWS, ROWS])[::2][:8]
    for array in (read_only, strided, np.asfortranarray(ROWS)):
        answer = full_answer(ROWS, PROMPT)
        answer["choices"][0]["routed_experts"] = array
        rows = decode_choice(answer, num_prompt=PROMPT).rows
        np.testing.assert_array_equal(rows, array)
        assert rows.flags.writeable and rows.flags.c_contiguous
    answer["choices"][0]["routed_experts"] = npy(np.asfortranarray(ROWS))
    np.testing.assert_array_equal(decode_choice(answer, num_prompt=PROMPT).rows, ROWS)


def test_row_versions_follow_the_pass_that_computed_each_row() -> None:
    answer = full_answer(ROWS, PROMPT)
    answer["choices"][0]["weight_versions"] = [
        {"version": "a", "start": 0, "end": 2},
        {"version": "b", "start": 2, "end": 4},
    ]
    versions = decode_choice(answer, num_prompt=PROMPT).versions
    # generated token j was sampled by the pass of row P + j - 1
    assert versions == ["a"] * 4 + ["a", "a"] + ["b", "b"]
    assert decode_choice(sglang_answer(ROWS, PROMPT), shape=SHAPE).versions == ["7"] * 8
    assert decode_choice(full_answer(ROWS, PROMPT), num_prompt=PROMPT).versions is None


def test_every_error_is_the_one_users_type() -> None:
    assert issubclass(RoutesError, R3Error)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 6, 3 * 65536 + 1, 3 * 65536 * 2 + 3])
def test_numpys_base64_equals_the_standard_librarys(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert base64_numpy.decode(base64.b64encode(data).decode()).tobytes() == data


@pytest.mark.parametrize(
    "text",
    ["AAA", "AAAAA", "A===", "====", "AA=A", "AA==AAAA", "AAAA*AAA", "AAA\n", "AAAA AAA", "é" * 4],
)
def test_both_decoders_refuse_the_same_base64(text: str, decoder: str) -> None:
    with pytest.raises(RoutesError, match=r"^here: expected padded base64, got \d+ characters: "):
        decode_segment(text, "here")
