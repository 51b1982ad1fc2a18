"""Find the rows in an answer, whichever server sent it.

| server | where the rows are |
|---|---|
| this project, `split` | `prompt_routed_experts` (top or choice), `choices[].routed_experts` |
| this project, `full`, and vLLM 0.22 to 0.33 | `choices[].routed_experts`, base64 npy |
| stock vLLM 0.21, OpenAI endpoints only | as `split`, nested lists over MoE layers only |
| SGLang `/generate` | `meta_info.routed_experts`, base64 int32 without a header |
| SGLang OpenAI endpoints | `sglext.routed_experts` (once `sgl_ext`), the first choice's only |

This module only looks things up; `decode` does the arithmetic. It imports nothing but the standard
library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_r3.client.shape import INTEGER, INTEGERS, OBJECT, OBJECTS, STRING, RoutesError, take

SGLANG_EXTENSIONS = ("sglext", "sgl_ext")


@dataclass(frozen=True)
class RawChoice:
    """One choice of an answer, undecoded.

    Attributes:
        prompt: the prompt's field, None where the sender has no such part.
        generated: the choice's field.
        layout: `split`, `full`, or None where only the row count can tell.
        spans: (version, first, end) over generated tokens, as the server labels its weights.
        runs: (first row, version), each up to the next, which say it of every row.
    """

    index: int
    prompt: Any
    generated: Any
    layout: str | None
    start: int | None
    num_prompt: int | None
    num_generated: int | None
    token_ids: list[int] | None
    finish_reason: str | None
    spans: list[tuple[str, int, int]] | None
    runs: list[tuple[int, str]] | None = None


@dataclass(frozen=True)
class RawAnswer:
    """An answer's choices with what the server says of the model."""

    request: str
    choices: list[RawChoice]
    meta: Mapping[str, Any] = field(default_factory=dict)


def read_answer(answer: Any, request: str | None = None) -> RawAnswer:
    """Look up rows, token counts and finish reasons of every choice.

    Args:
        answer: the parsed JSON body of a server, or SGLang's list of bodies for n > 1.
        request: names the request in errors; default: the id that the answer carries.

    Raises:
        RoutesError: the body is an error answer or no answer at all.
    """
    name = request or "answer"
    if isinstance(answer, list) or (isinstance(answer, Mapping) and "meta_info" in answer):
        return _read_sglang(answer if isinstance(answer, list) else [answer], request)
    if not isinstance(answer, Mapping):
        raise RoutesError(f"{name}: expected a JSON object, got {type(answer).__name__}")
    ids = [take(answer, field, STRING, name) for field in ("request_id", "id")]
    name = request or ids[0] or ids[1] or name
    choices = take(answer, "choices", OBJECTS, name)
    if not choices:
        error = answer.get("error") or answer.get("message")
        message = error.get("message") if isinstance(error, Mapping) else error
        found = f"the error {message!r}" if message else f"the fields {sorted(answer)}"
        raise RoutesError(f"{name}: expected an answer with choices, got {found}")
    meta = take(answer, "routed_experts_meta", OBJECT, name) or {}
    return RawAnswer(name, [_vllm_choice(answer, meta, part, name) for part in choices], meta)


def _vllm_choice(
    answer: Mapping[str, Any], meta: Mapping[str, Any], choice: Mapping[str, Any], name: str
) -> RawChoice:
    index = take(choice, "index", INTEGER, name) or 0
    where = f"request {name}, choice {index}"
    prompt, generated = choice.get("prompt_routed_experts"), choice.get("routed_experts")
    prompt = answer.get("prompt_routed_experts") if prompt is None else prompt
    layout = take(meta, "layout", STRING, where) or (None if prompt is None else "split")
    if prompt is None and generated is None:
        generated = _sglang_extension(answer, choice, index, where)
        layout = layout if generated is None else "full"
    sent = take(choice, "prompt_token_ids", INTEGERS, where)
    sent = sent or take(answer, "prompt_token_ids", INTEGERS, where)
    # usage sums over the choices
    usage = take(answer, "usage", OBJECT, where) if len(answer["choices"]) == 1 else None
    num_prompt = len(sent) if sent else take(usage or {}, "prompt_tokens", INTEGER, where)
    start = take(meta, "start", INTEGER, where)
    return RawChoice(
        index, prompt, generated, layout, start, num_prompt,
        *_generated(choice, "token_ids", usage or {}, where), *_ending(choice, answer, where),
        _runs(choice, answer, meta, where),
    )  # fmt: skip


def _sglang_extension(
    answer: Mapping[str, Any], choice: Mapping[str, Any], index: int, where: str
) -> Any:
    for holder in (choice, answer) if index == 0 else (choice,):
        for name in SGLANG_EXTENSIONS:
            rows = (take(holder, name, OBJECT, where) or {}).get("routed_experts")
            if rows is not None:
                return rows
    return None


def _read_sglang(bodies: list[Any], request: str | None) -> RawAnswer:
    choices = []
    for index, body in enumerate(bodies):
        meta = body.get("meta_info") if isinstance(body, Mapping) else None
        name = request or "answer"
        if not isinstance(meta, Mapping):
            found = type(body).__name__
            raise RoutesError(f"{name}: expected meta_info in part {index}, got {found}")
        request = request or take(meta, "id", STRING, name)
        where = f"request {request or name}, choice {index}"
        start = take(meta, "routed_experts_start_len", INTEGER, where)
        num_prompt = take(meta, "prompt_tokens", INTEGER, where)
        choice = RawChoice(
            index, None, meta.get("routed_experts"), "full", start, num_prompt,
            *_generated(body, "output_ids", meta, where), *_ending(meta, meta, where),
        )  # fmt: skip
        choices.append(choice)
    if not choices:
        raise RoutesError(f"{request or 'answer'}: expected at least one part, got an empty list")
    return RawAnswer(request or "answer", choices)


def _generated(
    holder: Mapping[str, Any], name: str, counts: Mapping[str, Any], where: str
) -> tuple[int | None, list[int] | None]:
    """Number and ids of the generated tokens."""
    token_ids = take(holder, name, INTEGERS, where)
    counted = take(counts, "completion_tokens", INTEGER, where)
    return counted if token_ids is None else len(token_ids), token_ids


def _ending(
    choice: Mapping[str, Any], answer: Mapping[str, Any], where: str
) -> tuple[str | None, list[tuple[str, int, int]] | None]:
    """Finish reason and weight versions: spans over generated tokens, or one for the answer."""
    reason = choice.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, Mapping) else reason
    spans = []
    for span in take(choice, "weight_versions", OBJECTS, where) or []:
        first, end = (take(span, name, INTEGER, where) for name in ("start", "end"))
        if first is None or end is None or "version" not in span:
            raise RoutesError(f"{where}: expected weight_versions with version, start and end")
        spans.append((str(span["version"]), first, end))
    single = answer.get("weight_version")
    if not spans and single is not None:
        spans = [(str(single), 0, -1)]
    return reason if isinstance(reason, str) else None, spans or None


def _runs(
    choice: Mapping[str, Any], answer: Mapping[str, Any], meta: Mapping[str, Any], where: str
) -> list[tuple[int, str]] | None:
    """Weight versions by row: the choice's own, or the answer's, which may go on behind its rows.

    The answer's are those of its first choice, and of others if they fit.
    """
    runs = choice.get("routed_experts_weight_versions")
    runs = meta.get("weight_versions") if runs is None else runs
    if runs is None:
        return None
    good = isinstance(runs, list) and all(
        isinstance(run, (list, tuple)) and [type(part) for part in run] == [int, str]
        for run in runs
    )
    if not good:
        raise RoutesError(
            f"{where}: expected weight_versions [[first row, version], …], got {runs!r}"
        )
    return [(first, version) for first, version in runs]
