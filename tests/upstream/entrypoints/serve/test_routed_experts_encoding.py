# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows to pieces of JSON text, and the text into the answer."""

import asyncio
import base64
import io
import json

import numpy as np
import pydantic
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from vllm.entrypoints.serve.routed_experts import encoding, protocol, splice

RoutedExpertsRows = encoding.RoutedExpertsRows


def make_rows(num_rows: int, num_experts: int = 16) -> np.ndarray:
    """Ids that depend on row, layer and place, so that a shift cannot hide."""
    ids = np.arange(num_rows * 6) * 7 % num_experts
    return ids.reshape(-1, 3, 2).astype("uint8" if num_experts <= 256 else "int16")


def text_of(rows: np.ndarray, how: str) -> bytes:
    return b"".join(RoutedExpertsRows(rows, how).json_pieces())


def load(value: str) -> np.ndarray:
    blob = base64.b64decode(value, validate=True)
    return np.load(io.BytesIO(blob), allow_pickle=False)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 9, 10, 11, 200])
@pytest.mark.parametrize("num_experts", [1, 11, 256, 257, 1024])
def test_text_holds_the_rows(monkeypatch, num_rows: int, num_experts: int):
    # Pieces end within the data, at its end, and one byte or row beside it.
    monkeypatch.setattr(encoding, "_BYTES_AT_ONCE", 9)
    monkeypatch.setattr(encoding, "_IDS_AT_ONCE", 60)
    rows = make_rows(num_rows, num_experts)
    rows[-1:, -1, -1] = num_experts - 1
    nested = text_of(rows, "list")
    assert nested == json.dumps(rows.tolist(), separators=(",", ":")).encode()
    assert RoutedExpertsRows(rows, "list").json_value() == rows.tolist()
    value = json.loads(text_of(rows, "npy"))
    assert RoutedExpertsRows(rows, "npy").json_value() == value
    found = load(value)
    assert found.dtype.str == ("|u1" if num_experts <= 256 else "<i2")
    np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("most", [9, 10, 99, 100, 255, 256, 999, 1000, 1001, 32767])
def test_ids_around_every_width_survive_nested_lists(most: int):
    rows = np.array([[[0, most], [most, 1]]], dtype="int16")
    expected = json.dumps(rows.tolist(), separators=(",", ":"))
    assert text_of(rows, "list") == expected.encode()


def test_strided_read_only_and_big_endian_rows_are_encoded():
    rows = make_rows(8)
    locked = rows.copy()
    locked.flags.writeable = False
    views = [rows[::2], rows[:, ::-1], rows.transpose(0, 2, 1), locked]
    for array in (*views, np.asfortranarray(rows), rows.astype(">i2")):
        found = load(json.loads(text_of(array, "npy")))
        assert found.dtype.str in ("|u1", "<i2") and found.flags.c_contiguous
        np.testing.assert_array_equal(found, array)
        assert json.loads(text_of(array, "list")) == array.tolist()


def test_wire_form_of_npy_is_this_string():
    rows = np.array([[[0, 255], [7, 1]]], dtype="uint8")
    assert RoutedExpertsRows(rows, "npy").json_value() == (
        "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBl"
        "JzogKDEsIDIsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg"
        "ICAgICAgICAgICAgIAoA/wcB"
    )


class Answer(BaseModel):
    text: str
    prompt_routed_experts: protocol.PromptRows
    routed_experts: protocol.OptionalChoiceRows
    routed_experts_meta: dict | None = None


async def served(answer: BaseModel) -> tuple[dict, bytes]:
    """Headers and body of the response."""
    app = FastAPI()

    @app.get("/")
    async def get():
        return await splice.json_response(answer, headers={"x-of": "metrics"})

    response = TestClient(app).get("/")
    return dict(response.headers), response.content


async def event_of(answer: BaseModel) -> str:
    pieces = [piece async for piece in splice.sse_event(answer)]
    assert all(isinstance(piece, str) for piece in pieces)
    return "".join(pieces)


@pytest.mark.parametrize("how", ["npy", "list"])
@pytest.mark.parametrize(
    "text", ["a", 'quotes " \\ \n', "é 日本 \u2028", "x" * 100_000, "-0", '"-1"']
)
def test_answer_with_rows_is_the_one_that_pydantic_writes(text: str, how: str):
    answer = Answer(
        text=text,
        routed_experts=RoutedExpertsRows(make_rows(2), how),
        prompt_routed_experts=RoutedExpertsRows(make_rows(5), how),
        routed_experts_meta={"start": 0},
    )
    whole = json.loads(answer.model_dump_json())
    assert answer.model_dump() == whole
    headers, body = asyncio.run(served(answer))
    assert json.loads(body) == whole
    assert headers["content-length"] == str(len(body))
    assert headers["content-type"] == "application/json"
    assert headers["x-of"] == "metrics"
    event = asyncio.run(event_of(answer))
    assert event.startswith("data: ") and event.endswith("\n\n")
    assert json.loads(event[len("data: ") :]) == whole


def test_answer_without_rows_is_written_as_ever():
    answer = Answer(text="é")
    headers, body = asyncio.run(served(answer))
    assert body == '{"text":"é","prompt_routed_experts":null,'.encode() + (
        b'"routed_experts_meta":null}'
    )
    assert headers["x-of"] == "metrics"
    assert asyncio.run(event_of(answer)) == f"data: {answer.model_dump_json()}\n\n"


@pytest.mark.parametrize(("how", "num_pieces"), [("npy", 5), ("list", 100)])
def test_others_are_served_between_the_pieces_of_an_answer(how: str, num_pieces: int):
    rows = np.zeros((10_000, 48, 8), dtype="uint8")
    answer = Answer(
        text="a",
        routed_experts=RoutedExpertsRows(rows, how),
        routed_experts_meta={"start": 0},
    )
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def write() -> list[int]:
        other = asyncio.create_task(count_turns())
        await splice.json_response(answer)
        turns_of_response = turns
        async for piece in splice.sse_event(answer):
            assert len(piece) <= 2**20 + 1
        other.cancel()
        return [turns_of_response, turns - turns_of_response]

    assert min(asyncio.run(write())) >= num_pieces


@pytest.mark.parametrize(
    "field",
    [
        *(protocol.ChoiceRows, protocol.OptionalChoiceRows, protocol.PromptRows),
        *(protocol.OptionalPromptRows, protocol.ChoicePromptRows),
    ],
)
def test_fields_of_rows_are_documented_with_shape_and_dtype(field):
    schema = pydantic.create_model("Answer", rows=field).model_json_schema()
    field = schema["properties"]["rows"]
    for word in ("[rows, num_layers, top_k]", "uint8", "int16", "npy", "base64"):
        assert word in field["description"]
    types = {option["type"] for option in field["anyOf"]}
    assert types == {"string", "array", "object", "null"}


def test_fields_of_meta_are_documented():
    meta = protocol.RoutedExpertsMeta.model_json_schema()["properties"]
    assert set(meta) == {
        *("start", "num_layers", "moe_layers", "num_experts"),
        *("top_k", "dtype", "encoding", "layout"),
        "weight_versions",
    }
    assert all(field["description"] for field in meta.values())
