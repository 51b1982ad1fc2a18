# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What rows a request gets, rows to JSON text, and the text into the answer."""

import asyncio
import base64
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import BaseModel

from vllm.entrypoints.serve.routed_experts.encoding import (
    RoutedExpertsRows,
    base64_chunks,
)
from vllm.entrypoints.serve.routed_experts.frontend import (
    NO_ROUTED_EXPERTS,
    RoutedExpertsFrontend,
)
from vllm.entrypoints.serve.routed_experts.protocol import (
    ChoiceRows,
    PromptRows,
    RoutedExpertsRequestFields,
)
from vllm.entrypoints.serve.routed_experts.splice import json_response, sse_event
from vllm.sampling_params import SamplingParams

INFO = {
    "num_layers": 4,
    "moe_layers": [1, 3],
    "num_experts": 300,
    "top_k": 2,
    "dtype": "int16",
}


def make_rows(num_rows: int, dtype: str, most: int) -> np.ndarray:
    return (np.arange(num_rows * 6) * 37 % most).astype(dtype).reshape(num_rows, 3, 2)


@pytest.mark.parametrize(
    "sizes", [(0,), (1,), (3, 2), (0, 4), (1, 1, 1), (511, 514), (1025,)]
)
@pytest.mark.parametrize(("dtype", "most"), [("uint8", 256), ("int16", 5000)])
@pytest.mark.parametrize("encoding", ["npy", "list"])
def test_text_holds_the_rows(
    sizes: tuple[int, ...], dtype: str, most: int, encoding: str
):
    parts = tuple(make_rows(size, dtype, most) for size in sizes)
    rows = RoutedExpertsRows(parts, encoding)
    value = json.loads(rows.json_bytes())
    assert value == rows.json_value()
    whole = np.concatenate(parts)
    if encoding == "list":
        assert value == whole.tolist()
        return
    found = np.load(io.BytesIO(base64.b64decode(value)), allow_pickle=False)
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, whole)


def test_strided_and_read_only_rows_are_encoded():
    rows = make_rows(8, "uint8", 256)[::2].transpose(0, 2, 1)
    rows.flags.writeable = False
    text = RoutedExpertsRows((rows,), "npy").json_bytes()
    found = np.load(io.BytesIO(base64.b64decode(json.loads(text))))
    np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("cuts", [(0, 1), (1, 2), (2, 2), (3, 7), (1, 1)])
def test_base64_of_pieces_is_that_of_the_whole(cuts: tuple[int, int]):
    data = bytes(range(11))
    first, second = cuts
    buffers = [data[:first], data[first:second], data[second:]]
    assert b"".join(base64_chunks(buffers)) == base64.b64encode(data)


class Answer(BaseModel):
    text: str
    routed_experts: ChoiceRows
    prompt_routed_experts: PromptRows
    routed_experts_meta: dict | None = None


def test_rows_are_put_into_the_answer_once_each():
    first, second = (
        RoutedExpertsRows((make_rows(n, "uint8", 256),), "npy") for n in (1, 2)
    )
    answer = Answer(
        text='quotes " and ünicode',
        routed_experts=first,
        prompt_routed_experts=second,
        routed_experts_meta={"start": 0},
    )
    expected = {
        "text": 'quotes " and ünicode',
        "routed_experts": first.json_value(),
        "prompt_routed_experts": second.json_value(),
        "routed_experts_meta": {"start": 0},
    }
    assert json.loads(json_response(answer).body) == expected
    event = sse_event(answer)
    assert isinstance(event, str) and event.startswith("data: ")
    assert json.loads(event[len("data: ") :]) == expected


def test_answer_without_rows_is_written_as_ever():
    answer = Answer(text="a")
    assert json.loads(json_response(answer).body) == answer.model_dump()
    assert sse_event(answer) == f"data: {answer.model_dump_json()}\n\n"


class FakeEngine:
    """An engine whose workers all answer INFO."""

    def __init__(self, **model_config: object) -> None:
        self.calls: list[str] = []
        self.model_config = SimpleNamespace(**model_config)

    async def collective_rpc(self, method: str) -> list[dict]:
        self.calls.append(method)
        return [INFO, INFO]


def test_engine_is_asked_once_and_by_the_first_request_that_wants_rows():
    engine = FakeEngine(
        enable_return_routed_experts=True,
        routed_experts_encoding="npy",
        routed_experts_layout="split",
    )
    frontend = RoutedExpertsFrontend(engine)
    unwanted = RoutedExpertsRequestFields(return_routed_experts=False)
    wanted = RoutedExpertsRequestFields(
        routed_experts_prompt_start=2, routed_experts_layout="full"
    )

    async def ask() -> None:
        answer = await frontend.new_answer(unwanted, SamplingParams(), 5)
        assert answer is NO_ROUTED_EXPERTS and engine.calls == []
        for _ in range(2):
            params = SamplingParams()
            answer = await frontend.new_answer(wanted, params, 5)
            assert answer.meta.model_dump() == {
                **INFO,
                "start": 2,
                "encoding": "npy",
                "layout": "full",
            }
            assert params.return_routed_experts is True
            assert params.routed_experts_prompt_start == 2
            assert params.routed_experts_layout == "full"

    asyncio.run(ask())
    assert engine.calls == ["get_routed_experts_info"]


def test_engine_that_does_not_know_the_flag_returns_none():
    engine = FakeEngine()
    frontend = RoutedExpertsFrontend(engine)
    params = SamplingParams()
    request = RoutedExpertsRequestFields()
    answer = asyncio.run(frontend.new_answer(request, params, 5))
    assert answer is NO_ROUTED_EXPERTS and engine.calls == []
    assert not params.return_routed_experts
