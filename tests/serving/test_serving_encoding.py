"""The answer's parts without a server: encoding, splicing, the check of counts, merged deltas."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import numpy as np
import pytest
from pydantic import BaseModel
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponse,
    CompletionResponseChoice,
)
from vllm.entrypoints.openai.engine.protocol import UsageInfo
from vllm.entrypoints.serve.disagg.protocol import GenerateResponse, GenerateResponseChoice
from vllm.entrypoints.serve.routed_experts.encoding import RoutedExpertsRows, base64_chunks
from vllm.entrypoints.serve.routed_experts.frontend import RoutedExpertsAnswer
from vllm.entrypoints.serve.routed_experts.protocol import RoutedExpertsMeta
from vllm.entrypoints.serve.routed_experts.splice import json_response, sse_event
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.output_processor import RequestOutputCollector

L, K = 3, 2


def rows_of(n, num_experts=16, first=0):
    """Ids that depend on row, layer and place, so that a shift cannot hide."""
    ids = (np.arange(first * L * K, (first + n) * L * K) * 7) % num_experts
    return ids.reshape(n, L, K).astype("uint8" if num_experts <= 256 else "int16")


def loaded(text):
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)


@pytest.mark.parametrize("encoding", ["npy", "list"])
@pytest.mark.parametrize("cut", [0, 1, 2, 7])
@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(1, "uint8"), (11, "uint8"), (256, "uint8"), (257, "int16"), (1024, "int16")],
)
def test_encoded_parts_decode_to_their_concatenation(num_experts, dtype, cut, encoding):
    rows = rows_of(200, num_experts)
    rows[-1, -1, -1] = num_experts - 1
    text = RoutedExpertsRows((rows[:cut], rows[cut:]), encoding).json_bytes()
    value = json.loads(text)
    if encoding == "npy":
        assert loaded(value).dtype.name == dtype
        value = loaded(value)
    assert np.array_equal(np.array(value), rows)


@pytest.mark.parametrize("biggest", [9, 10, 99, 100, 255, 256, 257, 511, 999, 1000, 1001])
def test_ids_around_every_width_survive_nested_lists(biggest):
    rows = np.array([[[0, biggest], [biggest, 1]]], dtype="int16")
    text = RoutedExpertsRows((rows,), "list").json_bytes()
    assert text == json.dumps(rows.tolist(), separators=(",", ":")).encode()


@pytest.mark.parametrize("encoding", ["npy", "list"])
def test_empty_strided_and_read_only_arrays_are_encoded(encoding):
    rows = rows_of(8)
    locked = rows.copy()
    locked.flags.writeable = False
    big_endian = rows.astype(">i2")
    for array in (rows[:0], rows[::2], rows[:, ::-1], locked, np.asfortranarray(rows), big_endian):
        value = json.loads(RoutedExpertsRows((array,), encoding).json_bytes())
        if encoding == "npy":
            assert loaded(value).shape == array.shape
            assert loaded(value).dtype.str in ("|u1", "<i2")
            value = loaded(value)
        assert np.array_equal(np.array(value).reshape(array.shape), array)


def test_wire_form_of_npy_is_this_string():
    rows = np.array([[[0, 255], [7, 1]]], dtype="uint8")
    assert RoutedExpertsRows((rows,), "npy").json_value() == (
        "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDEs"
        "IDIsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg"
        "IAoA/wcB"
    )


@pytest.mark.parametrize("sizes", [[], [0], [1], [2, 0, 1], [1, 1, 1, 1], [3, 4, 5], [7, 2, 2]])
def test_base64_of_pieces_equals_base64_of_the_whole(sizes):
    whole = bytes(range(sum(sizes)))
    ends = np.cumsum([0, *sizes])
    pieces = [whole[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    assert b"".join(base64_chunks(pieces)) == base64.b64encode(whole)


META = RoutedExpertsMeta(
    start=0,
    num_layers=L,
    moe_layers=[0, 2],
    num_experts=16,
    top_k=K,
    dtype="uint8",
    encoding="npy",
    layout="split",
)


def output(index=0, tokens=(5, 6, 7), rows=True, finish="length"):
    return CompletionOutput(
        index=index,
        text="ab",
        token_ids=list(tokens),
        cumulative_logprob=None,
        logprobs=None,
        routed_experts=rows_of(len(tokens) - 1, first=9) if rows is True else rows,
        finish_reason=finish,
    )


def result(*outputs, prompt_rows=True, finished=True):
    return RequestOutput(
        request_id="cmpl-1",
        prompt=None,
        prompt_token_ids=[1, 2, 3, 4],
        prompt_logprobs=None,
        outputs=list(outputs),
        finished=finished,
        prompt_routed_experts=rows_of(4) if prompt_rows is True else prompt_rows,
    )


def response_of(text):
    return GenerateResponse(
        choices=[
            GenerateResponseChoice(index=0, routed_experts=RoutedExpertsRows((rows_of(2),), "npy"))
        ],
        request_id=text,
        prompt_routed_experts=RoutedExpertsRows((rows_of(4),), "list"),
        routed_experts_meta=META,
    )


@pytest.mark.parametrize(
    "text", ["plain", 'quotes " \\ \n', "é 日本 \u2028", "x" * 100_000, "-0", '"-1"']
)
def test_spliced_answer_equals_the_answer_written_whole(text):
    response = response_of(text)
    assert json.loads(json_response(response).body) == json.loads(response.model_dump_json())
    event = sse_event(response)
    assert isinstance(event, str) and event.startswith("data: ") and event.endswith("\n\n")
    assert json.loads(event[6:]) == json.loads(response.model_dump_json())


def test_answer_without_rows_is_written_as_before():
    class Stock(BaseModel):
        a: int = 1
        text: str = "é"

    assert json_response(Stock()).body == '{"a":1,"text":"é"}'.encode()
    assert sse_event(Stock()) == 'data: {"a":1,"text":"é"}\n\n'


def test_response_model_reads_back_what_it_wrote():
    usage = UsageInfo()
    rows = RoutedExpertsRows((rows_of(2),), "npy")
    choice = CompletionResponseChoice(index=0, text="", routed_experts=rows)
    written = CompletionResponse(model="m", choices=[choice], usage=usage).model_dump_json()
    read = CompletionResponse.model_validate_json(written)
    assert np.array_equal(loaded(read.choices[0].routed_experts), rows_of(2))


@pytest.mark.parametrize(
    ("prompt_rows", "rows", "message"),
    [
        (
            True,
            None,
            "expected generated rows (2, 3, 2) uint8 for 4 prompt + 3 generated tokens "
            "from start 0, got none",
        ),
        (
            True,
            rows_of(1),
            "expected generated rows (2, 3, 2) uint8 for 4 prompt + 3 generated "
            "tokens from start 0, got (1, 3, 2) uint8",
        ),
        (
            True,
            rows_of(3),
            "expected generated rows (2, 3, 2) uint8 for 4 prompt + 3 generated "
            "tokens from start 0, got (3, 3, 2) uint8",
        ),
        (
            True,
            rows_of(2).astype("int16"),
            "expected generated rows (2, 3, 2) uint8 for 4 prompt "
            "+ 3 generated tokens from start 0, got (2, 3, 2) int16",
        ),
        (
            None,
            True,
            "expected prompt rows (4, 3, 2) uint8 for 4 prompt + 3 generated tokens "
            "from start 0, got none",
        ),
        (
            rows_of(3),
            True,
            "expected prompt rows (4, 3, 2) uint8 for 4 prompt + 3 generated "
            "tokens from start 0, got (3, 3, 2) uint8",
        ),
    ],
)
def test_rows_that_do_not_fit_the_tokens_are_an_error(prompt_rows, rows, message):
    out = output(rows=rows)
    with pytest.raises(EngineGenerateError) as error:
        RoutedExpertsAnswer(META).choice_fields(result(out, prompt_rows=prompt_rows), out, 3)
    assert str(error.value) == f"request cmpl-1, choice 0: {message}"


def test_prompt_rows_are_handed_out_once_to_the_first_choice_that_ends():
    answer, sent = RoutedExpertsAnswer(META), []
    for index, finish in ((0, None), (1, "stop"), (0, None), (0, "length")):
        out = output(index, rows=True if finish else None, finish=finish)
        fields = answer.choice_fields(result(out), out, 3)
        assert ("routed_experts" in fields) == (finish is not None)
        sent.append(sorted(answer.top_fields()))
    both = ["prompt_routed_experts", "routed_experts_meta"]
    assert sent == [[], both, [], ["routed_experts_meta"]]


def merged(*results):
    async def run():
        collector = RequestOutputCollector(RequestOutputKind.DELTA, "cmpl-1")
        for one in results:
            collector.put(one)
        return await collector.get()

    return asyncio.run(run())


def test_merged_deltas_keep_the_rows_of_the_last():
    first = result(output(tokens=(5,), rows=None, finish=None), prompt_rows=None, finished=False)
    last = result(output(tokens=(6, 7), rows=rows_of(2)))
    one = merged(first, last)
    assert one.outputs[0].token_ids == [5, 6, 7]
    fields = RoutedExpertsAnswer(META).choice_fields(one, one.outputs[0], 3)
    assert np.array_equal(fields["routed_experts"].parts[0], rows_of(2))
    assert np.array_equal(one.prompt_routed_experts, rows_of(4))


def test_merged_deltas_of_two_choices_keep_the_rows_of_both():
    ends = [result(output(i, rows=rows_of(2, first=i))) for i in (0, 1)]
    runs_on = result(output(1, (5,), None, None), prompt_rows=None, finished=False)
    one = merged(runs_on, *ends)
    answer = RoutedExpertsAnswer(META)
    for out, count in zip(one.outputs, (4, 3), strict=True):
        if out.index == 1:
            out.routed_experts = rows_of(3)  # four tokens after the merge
        answer.choice_fields(one, out, count)
    assert "prompt_routed_experts" in answer.top_fields()


def test_choice_without_a_token_has_no_fields():
    for rows in (None, rows_of(0), rows_of(2)):
        answer = RoutedExpertsAnswer(META)
        out = output(tokens=(), rows=rows, finish="abort")
        assert answer.choice_fields(result(out, prompt_rows=None), out, 0) == {}
        assert answer.top_fields() == {}


def test_text_of_an_engine_error_reaches_the_client():
    from types import SimpleNamespace

    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.openai.server_utils import engine_error_handler

    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.server = None
    app.state.engine_client = SimpleNamespace(errored=False, is_running=True)
    app.exception_handler(EngineGenerateError)(engine_error_handler)

    @app.get("/")
    async def fail():
        raise EngineGenerateError("request cmpl-1: rows 3 != prompt 4 + generated 1 - 1")

    answer = TestClient(app).get("/")
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert message == "request cmpl-1: rows 3 != prompt 4 + generated 1 - 1"
