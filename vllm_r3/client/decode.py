"""Read routed experts out of a server's answer.

Takes every form that `servers` lists and returns one integer array (rows, L, K) a choice, or raises
RoutesError. Trainers import this module, so it needs numpy and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_r3.client.files import NO_FILES, RowFiles
from vllm_r3.client.merge import Count, merge_segments
from vllm_r3.client.npy import decode_segment
from vllm_r3.client.servers import RawChoice, read_answer
from vllm_r3.client.shape import UNKNOWN, RoutesError, RouteShape

ABORTED = ("abort", "aborted", "cancelled")


@dataclass(frozen=True)
class ChoiceRoutes:
    """The rows of one choice.

    Attributes:
        index: the choice's number.
        rows: (S - 1 - start, L, K), uint8 or int16; None where an aborted request carries none.
        count: prompt and generated tokens, and the start of the rows.
        finish_reason: as the server says it.
        versions: the weight version of each row, None where the server does not say.
        token_ids: the generated tokens, None where the answer leaves them out.
        note: what a caller should know, empty when all is well.
    """

    index: int
    rows: np.ndarray | None
    count: Count
    finish_reason: str | None = None
    versions: list[str] | None = None
    token_ids: list[int] | None = None
    note: str = ""


def decode_answer(
    answer: Any,
    *,
    num_prompt: int | Sequence[int] | None = None,
    start: int | None = None,
    shape: RouteShape = UNKNOWN,
    request: str | None = None,
    files: RowFiles = NO_FILES,
) -> list[ChoiceRoutes]:
    """Decode every choice of an answer.

    Args:
        answer: the parsed JSON body (or SGLang's list of bodies).
        num_prompt: prompt tokens P, one number or one for each choice; default: what the answer
            says.
        start: the `routed_experts_prompt_start` of the request; default: what the answer says, else
            0.
        shape: what the caller knows of the model. SGLang's buffers need num_layers and top_k; stock
            0.21's rows need moe_layers on a model with dense layers.
        request: names the request in errors.
        files: where rows in encoding `file` are read.

    Raises:
        RoutesError: rows are missing or do not fit the token count, the model or the encoding.
    """
    raw = read_answer(answer, request)
    shape = shape.joined(RouteShape.from_meta(raw.meta), raw.request)
    choices = raw.choices
    if num_prompt is None or isinstance(num_prompt, (int, np.integer)):
        num_prompt = [num_prompt] * len(choices)
    if len(num_prompt) != len(choices):
        raise RoutesError(
            f"{raw.request}: expected num_prompt for each of {len(choices)} choices, got "
            f"{len(num_prompt)}"
        )
    return [
        _decode_choice(
            choice, known, start, shape, f"request {raw.request}, choice {choice.index}", files
        )
        for choice, known in zip(choices, num_prompt, strict=True)
    ]


def decode_choice(answer: Any, index: int = 0, **known: Any) -> ChoiceRoutes:
    """Decode an answer and return the choice with this index; takes what `decode_answer` takes."""
    for choice in decode_answer(answer, **known):
        if choice.index == index:
            return choice
    raise RoutesError(f"{known.get('request') or 'answer'}: expected a choice {index}, got none")


def _decode_choice(
    raw: RawChoice,
    num_prompt: int | None,
    start: int | None,
    shape: RouteShape,
    where: str,
    files: RowFiles,
) -> ChoiceRoutes:
    count = _count(raw, num_prompt, start, where)
    rows, note = None, ""
    if raw.prompt is not None or raw.generated is not None:
        rows = _rows(raw, count, shape, where, files)
    elif count.rows == 0:
        rows = np.zeros((0, shape.num_layers or 0, shape.top_k or 0), np.uint8)
    elif raw.finish_reason in ABORTED:
        note = f"{where}: aborted after {count.num_generated} tokens, without rows"
    else:
        raise RoutesError(
            f"{where}: expected {count.rows} rows for {count.num_tokens} tokens from start "
            f"{count.start}, got none: start the server with --enable-return-routed-experts and "
            "leave return_routed_experts unset or true"
        )
    versions = None
    if rows is not None and raw.runs is not None:
        versions = run_versions(raw.runs, count, where)
    elif rows is not None and raw.spans is not None:
        versions = row_versions(raw.spans, count)
    return ChoiceRoutes(raw.index, rows, count, raw.finish_reason, versions, raw.token_ids, note)


def _rows(
    raw: RawChoice, count: Count, shape: RouteShape, where: str, files: RowFiles
) -> np.ndarray:
    segments = [decode_segment(raw.generated, f"{where}, routed_experts", files)]
    expected = [count.rows]
    if raw.layout == "split":
        segments.insert(0, decode_segment(raw.prompt, f"{where}, prompt_routed_experts", files))
        expected = [count.prompt_rows, count.generated_rows]
    return merge_segments(segments, expected, shape, count, where)


def _count(raw: RawChoice, num_prompt: int | None, start: int | None, where: str) -> Count:
    """Join what the caller knows of the counts with what the answer says."""
    if start is not None and raw.start is not None and start != raw.start:
        raise RoutesError(
            f"{where}: expected rows from start {start}, the answer says start {raw.start}"
        )
    if num_prompt is not None and raw.num_prompt is not None and num_prompt != raw.num_prompt:
        raise RoutesError(
            f"{where}: expected {num_prompt} prompt tokens, the answer says {raw.num_prompt}"
        )
    num_prompt = raw.num_prompt if num_prompt is None else num_prompt
    if num_prompt is None:
        raise RoutesError(f"{where}: the answer does not say its prompt tokens: give num_prompt")
    if raw.num_generated is None:
        raise RoutesError(f"{where}: the answer has no tokens: ask with return_token_ids true")
    start = raw.start or 0 if start is None else start
    if not 0 <= start <= num_prompt:
        raise RoutesError(f"{where}: start must be in [0, {num_prompt}], got {start}")
    return Count(int(num_prompt), raw.num_generated, int(start))


def run_versions(runs: list[tuple[int, str]], count: Count, where: str) -> list[str]:
    """Say which weights computed each row, of runs (first row, version) up to the next run.

    Runs that begin behind the rows are those of longer choices.

    Raises:
        RoutesError: the runs leave out the first row, or do not follow each other.
    """
    firsts, stop = [first for first, _ in runs], count.start + count.rows
    fits = not count.rows or firsts[:1] == [count.start]
    if not fits or any(a >= b for a, b in zip(firsts, firsts[1:], strict=False)):
        raise RoutesError(
            f"{where}: expected weight_versions whose first rows rise from {count.start}, got "
            f"{firsts}"
        )
    ends = [min(end, stop) for end in [*firsts[1:], stop]]
    return [v for (first, v), end in zip(runs, ends, strict=True) for _ in range(first, end)]


def row_versions(spans: list[tuple[str, int, int]], count: Count) -> list[str]:
    """Say which weights computed each row.

    Generated token j was sampled by the pass of token P + j - 1, so row i belongs to generated
    token i - P + 1; rows of the prompt before that belong to the first span. An end of -1 means "to
    the end".
    """
    generated = [spans[0][0]] * max(1, count.num_generated)
    for version, first, end in spans:
        for at in range(first, min(end, len(generated)) if end >= 0 else len(generated)):
            generated[at] = version
    return [
        generated[max(0, row - count.num_prompt + 1)]
        for row in range(count.start, count.start + count.rows)
    ]
