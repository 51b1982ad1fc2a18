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
    """

    index: int
    prompt: Any = None
    generated: Any = None
    layout: str | None = None
    start: int | None = None
    num_prompt: int | None = None
    num_generated: int | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    spans: list[tuple[str, int, int]] | None = None


@dataclass(frozen=True)
class RawAnswer:
    """An answer's choices with what the server says of the model."""

    request: str
    choices: list[RawChoice] = field(default_factory=list)
    meta: Mapping[str, Any] = field(default_factory=dict)


def read_answer(answer: Any, request: str | None = None) -> RawAnswer:
    """Look up rows, token counts and finish reasons of every choice.

    Args:
        answer: the parsed JSON body of a server, or SGLang's list of bodies for n > 1.
        request: names the request in errors; default: the id that the answer carries.

    Raises:
        RoutesError: the body is an error answer or no answer at all.
    """
    if isinstance(answer, list):
        return _read_sglang(answer, request)
    name = request or "answer"
    if not isinstance(answer, Mapping):
        raise RoutesError(f"{name}: expected a JSON object, got {type(answer).__name__}")
    if "meta_info" in answer:
        return _read_sglang([answer], request)
    name = request or take(answer, "request_id", STRING, name) or take(answer, "id", STRING, name)
    name = name or "answer"
    choices = take(answer, "choices", OBJECTS, name)
    if not choices:
        raise RoutesError(f"{name}: expected an answer with choices, got {_problem(answer)}")
    meta = take(answer, "routed_experts_meta", OBJECT, name) or {}
    return RawAnswer(name, [_vllm_choice(answer, meta, part, name) for part in choices], meta)


def _problem(answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, Mapping) else error or answer.get("message")
    return f"the error {message!r}" if message else f"the fields {sorted(answer)}"


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
    token_ids = take(choice, "token_ids", INTEGERS, where)
    # usage sums over the choices
    usage = take(answer, "usage", OBJECT, where) if len(answer["choices"]) == 1 else None
    return RawChoice(
        index=index,
        prompt=prompt,
        generated=generated,
        layout=layout,
        start=take(meta, "start", INTEGER, where),
        num_prompt=len(sent) if sent else take(usage or {}, "prompt_tokens", INTEGER, where),
        num_generated=_length(token_ids, usage or {}, where),
        token_ids=token_ids,
        finish_reason=_reason(choice),
        spans=_spans(choice, answer, where),
    )


def _length(token_ids: list[int] | None, counts: Mapping[str, Any], where: str) -> int | None:
    if token_ids is not None:
        return len(token_ids)
    return take(counts, "completion_tokens", INTEGER, where)


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
        name = request or "answer"
        if not isinstance(body, Mapping) or not isinstance(body.get("meta_info"), Mapping):
            found = type(body).__name__
            raise RoutesError(f"{name}: expected meta_info in part {index}, got {found}")
        request = request or take(body["meta_info"], "id", STRING, name)
        choices.append(_sglang_choice(index, body, body["meta_info"], request or name))
    if not choices:
        raise RoutesError(f"{request or 'answer'}: expected at least one part, got an empty list")
    return RawAnswer(request or "answer", choices)


def _sglang_choice(
    index: int, body: Mapping[str, Any], meta: Mapping[str, Any], name: str
) -> RawChoice:
    where = f"request {name}, choice {index}"
    token_ids = take(body, "output_ids", INTEGERS, where)
    return RawChoice(
        index=index,
        generated=meta.get("routed_experts"),
        layout="full",
        start=take(meta, "routed_experts_start_len", INTEGER, where),
        num_prompt=take(meta, "prompt_tokens", INTEGER, where),
        num_generated=_length(token_ids, meta, where),
        token_ids=token_ids,
        finish_reason=_reason(meta),
        spans=_spans(meta, meta, where),
    )


def _reason(holder: Mapping[str, Any]) -> str | None:
    value = holder.get("finish_reason")
    value = value.get("type") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def _spans(
    choice: Mapping[str, Any], answer: Mapping[str, Any], where: str
) -> list[tuple[str, int, int]] | None:
    """Weight versions: spans over generated tokens, or one for the whole answer."""
    found = []
    for span in take(choice, "weight_versions", OBJECTS, where) or []:
        first, end = (take(span, name, INTEGER, where) for name in ("start", "end"))
        if first is None or end is None or "version" not in span:
            raise RoutesError(f"{where}: expected weight_versions with version, start and end")
        found.append((str(span["version"]), first, end))
    single = answer.get("weight_version")
    return found or (None if single is None else [(str(single), 0, -1)])
