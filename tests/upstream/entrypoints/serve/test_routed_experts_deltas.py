# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Chunks of a stream with routed_experts_stream "delta"."""

import asyncio
import base64
import io
import json

import aiohttp
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.routed_experts.delta import RoutedExpertsDeltas
from vllm.entrypoints.serve.routed_experts.protocol import RoutedExpertsMeta
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineGenerateError

LAYERS, TOP_K, FIELD = 48, 8, 2**16
LAYOUTS, ENCODINGS = ["split", "full"], ["npy", "list"]


def make_rows(count: int) -> np.ndarray:
    rows = np.random.default_rng(7).integers(0, 128, (count, LAYERS, TOP_K))
    return rows.astype("uint8")


def make_deltas(encoding="npy", layout="split", several=False, start=0):
    meta = RoutedExpertsMeta(
        num_layers=LAYERS, moe_layers=list(range(LAYERS)), num_experts=128,
        top_k=TOP_K, dtype="uint8", start=start, encoding=encoding, layout=layout,
    )  # fmt: skip
    return RoutedExpertsDeltas(meta, several)


def result(rows, num_prompt, num_tokens, layout, first=False, index=0, finish=None):
    prompt_rows = None
    if first and layout == "split":
        prompt_rows, rows = rows[:num_prompt], rows[num_prompt:]
    output = CompletionOutput(
        index, "a", [5] * num_tokens, None, None, rows, finish_reason=finish
    )
    return RequestOutput(
        *("cmpl-1", None, [1] * num_prompt, None, [output], False),
        prompt_routed_experts=prompt_rows,
    )


def chunk_for(output: CompletionOutput) -> CompletionStreamResponse:
    choice = CompletionResponseStreamChoice(
        index=output.index, text=output.text, token_ids=list(output.token_ids)
    )
    return CompletionStreamResponse(id="cmpl-1", model="m", choices=[choice])


async def lines_of(answer: RoutedExpertsDeltas, steps: list[RequestOutput]):
    num_generated = 0
    for res in steps:
        (output,) = res.outputs
        num_generated += len(output.token_ids)
        chunk = chunk_for(output)
        async for event in answer.events(
            chunk, res, output, num_generated, exclude_unset=True
        ):
            yield event


def steps_of(rows, num_prompt, layout, counts):
    """Outputs with so many tokens each."""
    steps, sent, num_tokens = [], 0, 0
    for count in counts:
        num_tokens += count
        stop = num_prompt + num_tokens - 1
        new = rows[sent:stop]
        steps.append(result(new, num_prompt, count, layout, first=not steps))
        sent = stop
    return steps


def decode(value, encoding) -> np.ndarray:
    if encoding == "list":
        return np.array(value, dtype="uint8").reshape(-1, LAYERS, TOP_K)
    return np.load(io.BytesIO(base64.b64decode(value)))


def collect(chunks, layout, encoding, num_prompt, start=0):
    """All rows; holds each chunk against the tokens so far."""
    rows, num_tokens = [], 0
    for chunk in chunks:
        num_rows = start + sum(map(len, rows))
        assert chunk["routed_experts_meta"]["start"] == num_rows
        values = [chunk.get("prompt_routed_experts")]
        values += [choice.get("routed_experts") for choice in chunk["choices"]]
        rows += [decode(value, encoding) for value in values if value is not None]
        new = [choice.get("token_ids") or [] for choice in chunk["choices"]]
        num_tokens += sum(map(len, new))
        if any(new):
            assert start + sum(map(len, rows)) == num_prompt + num_tokens - 1
        else:
            assert bool(new) == (layout == "full" or num_rows >= num_prompt)
    return np.concatenate(rows)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_line_grows_with_the_sequence(layout, encoding):
    """A prompt of 12 MB and what piled up for a slow reader, by aiohttp's lines."""
    num_prompt, counts = (30_000, [1, 1, 4, 700]) if encoding == "npy" else (
        3_000, [1, 1, 4, 200],
    )  # fmt: skip
    rows = make_rows(num_prompt + sum(counts) - 1)
    app = FastAPI()

    @app.get("/")
    async def stream():
        answer = make_deltas(encoding, layout)
        steps = steps_of(rows, num_prompt, layout, counts)
        return StreamingResponse(lines_of(answer, steps))

    async def read():
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/") as resp,
        ):
            lines = [line async for line in resp.content]
        server.should_exit = True
        await serving
        return lines

    lines = [line for line in asyncio.run(read()) if line.strip()]
    assert max(map(len, lines)) < FIELD + 4096 < 2**17
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    found = collect(chunks, layout, encoding, num_prompt)
    assert found.tobytes() == rows.tobytes()
    # The prompt's rows are on chunks of their own, before the first token's.
    first = next(c for c in chunks if c["choices"] and c["choices"][0].get("token_ids"))
    assert first["routed_experts_meta"]["start"] == num_prompt
    assert "prompt_routed_experts" not in first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_outputs_without_a_chunk_go_with_the_next(layout):
    rows, answer = make_rows(10), make_deltas(layout=layout)
    first, second, third = steps_of(rows, 5, layout, [1, 2, 3])
    answer.keep(first, first.outputs[0])
    answer.keep(second, second.outputs[0])
    (output,) = third.outputs

    async def events():
        chunk = chunk_for(output)
        chunk.choices[0].token_ids = [5] * 6
        return [e async for e in answer.events(chunk, third, output, 6)]

    (event,) = asyncio.run(events())
    chunk = json.loads(event.removeprefix("data: "))
    assert collect([chunk], layout, "npy", 5).tobytes() == rows.tobytes()


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_rows_that_do_not_fit_the_tokens_end_the_stream(num_rows):
    answer = make_deltas()
    steps = [
        result(make_rows(6), 5, 2, "split", first=True),
        result(make_rows(num_rows) if num_rows else None, 5, 2, "split"),
    ]

    async def events():
        return [e async for e in lines_of(answer, steps)]

    with pytest.raises(EngineGenerateError, match="expected rows up to 8 for 5 prompt"):
        asyncio.run(events())
