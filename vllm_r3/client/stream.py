"""Fold the chunks of a streamed answer into one answer that `decode_answer` takes.

With `routed_experts_stream` "delta" every chunk brings the rows that have become known, from the
row on that its meta calls start; a stream that is cut has rows for all tokens that came. With "end"
they come whole on the chunk with a choice's finish reason; `prompt_routed_experts` on the first
such chunk only. SGLang repeats the whole answer so far in every chunk, so its last chunk is the
answer. It imports numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_r3.client.npy import decode_segment
from vllm_r3.client.servers import SGLANG_EXTENSIONS
from vllm_r3.client.shape import INTEGER, INTEGERS, OBJECT, OBJECTS, RoutesError, take

BOTH = ("prompt_token_ids", *SGLANG_EXTENSIONS)
CHOICE_FIELDS = (*BOTH, "finish_reason", "weight_versions")
TOP_FIELDS = (*BOTH, "id", "request_id", "usage", "weight_version")
PROMPT, GENERATED = "prompt_routed_experts", "routed_experts"
RUNS = "routed_experts_weight_versions"


@dataclass
class _Field:
    """One field of rows: its values so far, and the row that must come next."""

    values: list[Any] = field(default_factory=list)
    next_row: int = 0
    num_rows: int = 0

    def add(self, value: Any, first: int | None, where: str) -> int | None:
        """Take a value whose first row is `first`; return the row behind its last."""
        if self.values and first != self.next_row:
            raise RoutesError(
                f"{where}: expected rows from {self.next_row} on in the next chunk, got {first}"
            )
        if first is None or isinstance(value, Mapping):  # a file: never in deltas
            self.values.append(value)
            return None
        rows = decode_segment(value, where)
        if rows.ndim != 3:
            raise RoutesError(f"{where}: expected rows (rows, L, K), got shape {rows.shape}")
        self.values.append(rows)
        self.num_rows += len(rows)
        self.next_row = first + len(rows)
        return self.next_row

    def joined(self, limit: int | None, where: str) -> Any:
        """The value of an answer that was not streamed, of at most `limit` rows."""
        if len(self.values) == 1 and limit is None:
            return self.values[0]
        parts = [decode_segment(value, where) for value in self.values]
        parts = [part for part in parts if len(part)] or parts[:1]
        if len({part.shape[1:] for part in parts}) > 1:
            raise RoutesError(f"{where}: expected rows of one shape in all chunks, got several")
        return np.concatenate(parts)[:limit]


class StreamedAnswer:
    """What the chunks of one stream amount to so far."""

    def __init__(self) -> None:
        self._answer: dict[str, Any] = {}
        self._meta: Mapping[str, Any] | None = None
        self._choices: dict[int, dict[str, Any]] = {}
        # of a choice, or of the prompt of all of them (None)
        self._rows: dict[tuple[int | None, str], _Field] = {}
        # Rows of each choice when its last tokens came; of a long chunk some come before those.
        self._rows_at_tokens: dict[int, int] = {}
        # Weight versions by row, as their chunks tell them: those of the chunks' choices.
        self._runs: dict[int | None, list[Any]] = {}
        self._untold: set[int] = set()  # choices whose text came without token ids
        self._seen = 0

    @property
    def name(self) -> str:
        """What the answer calls itself."""
        return str(self._answer.get("request_id") or self._answer.get("id") or "stream")

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take in a parsed chunk (a `data:` line other than `[DONE]`).

        Raises:
            RoutesError: it is no chunk, or its rows do not follow those before.
        """
        self._seen += 1
        if not isinstance(chunk, Mapping):
            found = type(chunk).__name__
            raise RoutesError(f"stream: expected chunks of JSON objects, got {found}")
        if "meta_info" in chunk:
            self._answer = dict(chunk)
            return
        _update(self._answer, chunk, TOP_FIELDS)
        meta = take(chunk, "routed_experts_meta", OBJECT, self.name)
        self._meta = meta if self._meta is None else self._meta
        first = None if meta is None else take(meta, "start", INTEGER, self.name)
        runs = (meta or {}).get("weight_versions")
        if chunk.get(PROMPT) is not None:
            self._add_runs(None, runs)
        first = self._add_rows(chunk, PROMPT, None, first)
        for part in take(chunk, "choices", OBJECTS, "stream") or []:
            index = take(part, "index", INTEGER, "stream") or 0
            choice = self._choices.setdefault(index, {"index": index})
            _update(choice, part, CHOICE_FIELDS)
            own = part.get(RUNS)
            self._add_runs(index, runs if own is None else own)
            for name in (PROMPT, GENERATED):
                first = self._add_rows(part, name, index, first)
            token_ids = take(part, "token_ids", INTEGERS, "stream")
            delta = take(part, "delta", OBJECT, "stream") or {}
            if token_ids is None and (part.get("text") or delta.get("content")):
                self._untold.add(index)
            if token_ids is not None:
                choice.setdefault("token_ids", []).extend(token_ids)
            if token_ids and (index, GENERATED) in self._rows:
                self._rows_at_tokens[index] = self._rows[index, GENERATED].num_rows

    def _add_runs(self, index: int | None, runs: Any) -> None:
        if isinstance(runs, list):
            self._runs.setdefault(index, []).extend(runs)

    def _add_rows(
        self, holder: Mapping[str, Any], name: str, index: int | None, first: int | None
    ) -> int | None:
        if holder.get(name) is None:
            return first
        rows = self._rows.setdefault((index, name), _Field())
        return rows.add(holder[name], first, f"request {self.name}, {name}")

    def answer(self, *, cut: bool = False) -> dict[str, Any]:
        """Return the answer, as it would have come without streaming.

        Args:
            cut: the stream ended early: choices without a finish reason are taken as aborted, with
                the rows of the tokens that came (none, where no token did).

        Raises:
            RoutesError: the stream held no chunk, or (not `cut`) a choice has not finished.
        """
        if "meta_info" in self._answer:
            return self._answer
        if not self._choices and not cut:
            raise RoutesError(
                f"{self.name}: expected chunks with choices, got none in {self._seen} chunks"
            )
        choices = self._choices or {0: {"index": 0, "token_ids": []}}
        unfinished = [at for at in sorted(choices) if choices[at].get("finish_reason") is None]
        if unfinished and not cut:
            raise RoutesError(
                f"{self.name}: the stream ended after {self._seen} chunks without a finish_reason "
                f"for choices {unfinished}"
            )
        answer = dict(self._answer)
        if self._meta is not None:
            answer["routed_experts_meta"] = self._meta
        prompt = self._joined(None, PROMPT)
        if prompt is not None and any(choice.get("token_ids") != [] for choice in choices.values()):
            answer[PROMPT] = prompt
        answer["choices"] = [self._choice(choices[at], at in unfinished) for at in sorted(choices)]
        return answer

    def _choice(self, choice: dict[str, Any], is_cut: bool) -> dict[str, Any]:
        choice, index = dict(choice), choice["index"]
        if is_cut:
            choice["finish_reason"] = "abort"
            if index not in self._untold:
                choice.setdefault("token_ids", [])
            if choice.get("token_ids") == []:
                return choice
        for name in (PROMPT, GENERATED):
            limit = self._rows_at_tokens.get(index) if is_cut and name == GENERATED else None
            rows = self._joined(index, name, limit)
            if rows is not None:
                choice[name] = rows
        runs = _joined_runs(self._runs.get(None, []), self._runs.get(index, []))
        if runs:
            choice[RUNS] = runs
        return choice

    def _joined(self, index: int | None, name: str, limit: int | None = None) -> Any:
        rows = self._rows.get((index, name))
        return None if rows is None else rows.joined(limit, f"request {self.name}, {name}")


def collect_stream(chunks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Fold parsed chunks (the `data:` lines without `[DONE]`) into the answer they amount to.

    Raises:
        RoutesError: the stream held no chunk, or ended before every choice had finished.
    """
    stream = StreamedAnswer()
    for chunk in chunks:
        stream.add(chunk)
    return stream.answer()


def _update(target: dict[str, Any], source: Mapping[str, Any], names: Iterable[str]) -> None:
    target.update({name: source[name] for name in names if source.get(name) is not None})


def _joined_runs(prompt: list[Any], own: list[Any]) -> list[Any]:
    """Runs of the prompt's rows, then the choice's own, where the version is another.

    Runs that are none are left for `decode_answer` to refuse.
    """
    both = [*prompt, *own]
    if not all(isinstance(r, list) and len(r) == 2 and type(r[0]) is int for r in both):
        return both
    runs: list[Any] = []
    for run in [run for run in prompt if not own or run[0] < own[0][0]] + own:
        if not runs or run[1] != runs[-1][1]:
            runs.append(run)
    return runs
