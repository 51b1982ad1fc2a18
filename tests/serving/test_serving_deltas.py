"""routed_experts_stream "delta": rows with every chunk, cut streams, by value."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from oracle_checks import check_rows
from server_fixture import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    GENERATE,
    aborted,
    decode,
    request,
    seeded_prompt,
    wait_for,
)

PROMPT = seeded_prompt(3, 35)
DELTA = {"routed_experts_stream": "delta"}
LINE = 1 << 17  # above it aiohttp's line reader gives up
all_endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS)


@dataclass
class Part:
    """One choice as far as its chunks have come."""

    tokens: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    next_row: int | None = None
    prompt_rows: list[np.ndarray] = field(default_factory=list)
    finish_reason: str | None = None


class Reader:
    """Reads chunks by the contract alone; after each with tokens the rows must fit them."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.start = body.get("routed_experts_prompt_start") or 0
        self.prompts: dict[int, list[int]] = {}
        self.prompt = body.get("token_ids")
        self.choices: dict[int, Part] = {}
        self.prompt_rows: list[np.ndarray] = []
        self.metas: list[dict[str, Any]] = []

    def take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        self.prompt = self.prompt or chunk.get("prompt_token_ids")
        meta = chunk.get("routed_experts_meta")
        first = None if meta is None else meta["start"]
        on_top = chunk.get("prompt_routed_experts")
        if on_top is not None:
            first = self._prompt(self.prompt_rows, on_top, meta, first)
        for choice in chunk["choices"]:
            index = choice["index"]
            part = self.choices.setdefault(index, Part())
            assert part.finish_reason is None, "a chunk after the finish_reason"
            if choice.get("prompt_token_ids"):
                self.prompts[index] = choice["prompt_token_ids"]
            if choice.get("prompt_routed_experts") is not None:
                first = self._prompt(part.prompt_rows, choice["prompt_routed_experts"], meta, first)
            part.tokens += choice.get("token_ids") or []
            part.finish_reason = choice.get("finish_reason")
            if choice.get("routed_experts") is not None:
                rows = self._rows(choice["routed_experts"], meta)
                assert part.next_row in (None, first), (part.next_row, first)
                part.rows.append(rows)
                part.next_row = first + len(rows)
            if choice.get("token_ids"):
                tokens = [*self.prompt_of(index), *part.tokens]
                assert len(self.all_rows(index)) == len(tokens) - 1 - self.start

    def _prompt(self, held: list[np.ndarray], value: Any, meta: Any, first: int) -> int:
        assert first == self.start + sum(map(len, held))
        held.append(self._rows(value, meta))
        return first + len(held[-1])

    def _rows(self, value: Any, meta: dict[str, Any]) -> np.ndarray:
        self.metas.append(meta)
        sides = meta["num_layers"], meta["top_k"]
        return decode(value, meta["encoding"], meta["dtype"]).reshape(-1, *sides)

    def prompt_of(self, index: int) -> list[int]:
        return self.prompts.get(index) or self.prompt

    def all_rows(self, index: int) -> np.ndarray:
        part = self.choices[index]
        return np.concatenate([*(part.prompt_rows or self.prompt_rows), *part.rows])

    def check(self, kit: Any, where: str = "stream") -> None:
        """Compare the rows of all tokens that came with the oracle."""
        for index, part in self.choices.items():
            if not part.tokens:
                continue
            prompt, rows = self.prompt_of(index), self.all_rows(index)
            truth = kit.oracle.truth([*prompt, *part.tokens])
            split = np.split(rows, [len(prompt) - self.start])
            check_rows(kit.oracle, truth, len(prompt), *split, self.start, f"{where} {index}")


def stream(kit: Any, path: str, body: dict[str, Any], cut: int | None = None) -> Reader:
    """Read a stream, or its first `cut` chunks and go away."""
    reader = Reader(body)
    with kit.client.stream("POST", path, json=body | DELTA | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = (line for line in answer.iter_lines() if line)
        for at, line in enumerate(lines, 1):
            assert len(line) < LINE
            if line == "data: [DONE]":
                return reader
            reader.take(json.loads(line.removeprefix("data: ")))
            if at == cut:
                return reader
    raise AssertionError("no [DONE]")


def checked(kit: Any, path: str, body: dict[str, Any]) -> Reader:
    reader = stream(kit, path, body)
    assert all(part.finish_reason for part in reader.choices.values())
    reader.check(kit, path)
    return reader


@all_endpoints
@pytest.mark.parametrize("layout", ["split", "full"])
@pytest.mark.parametrize("start", [0, 34, 35])
def test_deltas_joined_are_the_end(kit, endpoint, layout, start):
    forms = {"routed_experts_layout": layout, "routed_experts_prompt_start": start}
    for encoding in ("npy", "list"):
        body = request(endpoint, PROMPT, routed_experts_encoding=encoding, **forms)
        reader = checked(kit, ENDPOINTS[endpoint], body)
        assert {meta["encoding"] for meta in reader.metas} == {encoding}
        end = kit.ask(ENDPOINTS[endpoint], body, stream=True)
        (choice,) = end.choices.values()
        values = [v for v in (end.prompt_rows, choice.rows) if v is not None]
        rows = [decode(v, encoding, "uint8").reshape(-1, 6, 4) for v in values]
        assert np.concatenate(rows).tobytes() == reader.all_rows(0).tobytes()
        assert choice.tokens == reader.choices[0].tokens


@all_endpoints
def test_32_streams_at_once_cut_at_every_tenth_chunk(kit, endpoint):
    def one(at: int) -> Reader:
        body = request(endpoint, seeded_prompt(300 + at, 20 + at), max_tokens=90, ignore_eos=True)
        return stream(kit, ENDPOINTS[endpoint], body, cut=10 * (1 + at % 8))

    with ThreadPoolExecutor(32) as pool:
        readers = list(pool.map(one, range(32)))
    for reader in readers:
        reader.check(kit)
    assert all(reader.choices[0].tokens for reader in readers)
    wait_for(lambda: kit.metric("num_requests_running", "num_requests_waiting") == 0, "idle")


@all_endpoints
@pytest.mark.parametrize("layout", ["split", "full"])
def test_three_choices(kit, endpoint, layout):
    body = request(endpoint, PROMPT, n=3, temperature=1.0, routed_experts_layout=layout)
    assert sorted(checked(kit, ENDPOINTS[endpoint], body).choices) == [0, 1, 2]


@pytest.mark.parametrize("layout", ["split", "full"])
def test_several_prompts(kit, layout):
    body = request("completions", [], n=2, temperature=1.0, routed_experts_layout=layout)
    reader = checked(kit, COMPLETIONS, body | {"prompt": [seeded_prompt(4, 20), PROMPT]})
    assert sorted(reader.choices) == [0, 1, 2, 3] and not reader.prompt_rows


@all_endpoints
def test_ends(kit, endpoint):
    path = ENDPOINTS[endpoint]
    checked(kit, path, request(endpoint, PROMPT, max_tokens=1))
    body = request(endpoint, PROMPT, max_tokens=60, stop=["e", "t", "a", "o"])
    assert checked(kit, path, body).choices[0].finish_reason == "stop"
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    checked(kit, path, body | usage)


def test_echo(kit):
    for body in (
        request("completions", PROMPT, echo=True, max_tokens=0),
        request("chat", PROMPT, echo=True),
    ):
        checked(kit, CHAT if "messages" in body else COMPLETIONS, body)


@all_endpoints
def test_aborted(kit, endpoint):
    body = request(endpoint, PROMPT, max_tokens=900, ignore_eos=True)
    reader = aborted(
        kit,
        lambda: stream(kit, ENDPOINTS[endpoint], body),
        lambda reader: reader.choices[0].finish_reason == "abort",
    )
    assert 0 < len(reader.choices[0].tokens) < 900
    reader.check(kit)


def test_only_streams_have_deltas(kit):
    for endpoint, path in ENDPOINTS.items():
        status, answer = kit.post(path, request(endpoint, PROMPT) | DELTA)
        assert status == 400 and "set stream to true" in answer["error"]["message"]
        body = request(endpoint, PROMPT, routed_experts_stream="chunk") | {"stream": True}
        assert kit.post(path, body)[0] == 400


def test_a_slow_reader_gets_all_rows(kit):
    body = request("generate", PROMPT, max_tokens=900, ignore_eos=True, logprobs=20)
    reader, end = Reader(body), kit.metric("generation_tokens_total") + 900
    with kit.client.stream("POST", GENERATE, json=body | DELTA | {"stream": True}) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        reader.take(json.loads(next(lines).removeprefix("data: ")))
        wait_for(lambda: kit.metric("generation_tokens_total") >= end, "tokens, none read")
        for line in lines:
            reader.take(json.loads(line.removeprefix("data: ")))
    assert len(reader.choices[0].tokens) == 900
    reader.check(kit)


@pytest.mark.parametrize("layout", ["split", "full"])
def test_long_prompt_comes_in_pieces_without_tokens(flagged, layout):
    """As lists, the 900 rows of the prompt are 100 kB."""
    prompt = seeded_prompt(9, 900)
    for endpoint, path in ENDPOINTS.items():
        if endpoint != "chat":
            reader = checked(flagged, path, request(endpoint, prompt, routed_experts_layout=layout))
            part = reader.choices[0]
            assert len(reader.prompt_rows or part.rows) >= 2
            assert bool(reader.prompt_rows) == (layout == "split")


def test_chunks_that_parsers_swallow_leave_their_rows_to_the_next(flagged):
    """Without token ids the tool parser sends no chunk for some tokens."""
    body = request("chat", PROMPT, max_tokens=40, ignore_eos=True, return_token_ids=True)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body |= {"tools": [tool], "tool_choice": "auto"}
    told = checked(flagged, CHAT, body)
    untold = stream(flagged, CHAT, body | {"return_token_ids": False})
    assert untold.all_rows(0).tobytes() == told.all_rows(0).tobytes()
