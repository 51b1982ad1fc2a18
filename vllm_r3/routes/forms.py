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

from vllm_r3.routes.rules import RoutesError


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
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    spans: list[tuple[str, int, int]] | None = None


@dataclass(frozen=True)
class RawAnswer:
    """An answer's choices with what the server says of the model."""

    request: str
    choices: list[RawChoice] = field(default_factory=list)
    meta: Mapping[str, Any] | None = None


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
    if not isinstance(answer, Mapping):
        raise RoutesError(
            f"{request or 'answer'}: expected a JSON object, got {type(answer).__name__}"
        )
    if "meta_info" in answer:
        return _read_sglang([answer], request)
    name = request or answer.get("request_id") or answer.get("id") or "answer"
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise RoutesError(f"{name}: expected an answer with choices, got {_problem(answer)}")
    return RawAnswer(
        name, [_vllm_choice(answer, choice, len(choices)) for choice in choices], _meta(answer)
    )


def _problem(answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, Mapping) else error or answer.get("message")
    return f"the error {message!r}" if message else f"the fields {sorted(answer)}"


def _meta(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    meta = answer.get("routed_experts_meta")
    return meta if isinstance(meta, Mapping) else None


def _vllm_choice(
    answer: Mapping[str, Any], choice: Mapping[str, Any], num_choices: int
) -> RawChoice:
    meta = _meta(answer) or {}
    prompt = choice.get("prompt_routed_experts")
    prompt = answer.get("prompt_routed_experts") if prompt is None else prompt
    generated = choice.get("routed_experts")
    layout = meta.get("layout") or ("split" if prompt is not None else None)
    extension = _sglang_extension(answer, choice)
    if prompt is None and generated is None and extension is not None:
        generated, layout = extension, "full"
    usage = answer.get("usage") or {}
    prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    token_ids = choice.get("token_ids")
    alone = num_choices == 1
    return RawChoice(
        index=int(choice.get("index", 0)),
        prompt=prompt,
        generated=generated,
        layout=layout,
        start=meta.get("start"),
        num_prompt=len(prompt_ids)
        if prompt_ids
        else (usage.get("prompt_tokens") if alone else None),
        num_generated=len(token_ids)
        if token_ids is not None
        else (usage.get("completion_tokens") if alone else None),
        prompt_token_ids=prompt_ids,
        token_ids=token_ids,
        finish_reason=_reason(choice.get("finish_reason")),
        spans=_spans(choice.get("weight_versions"), answer.get("weight_version")),
    )


def _sglang_extension(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> Any:
    for holder in (choice, answer):
        for name in ("sglext", "sgl_ext"):
            rows = (holder.get(name) or {}).get("routed_experts")
            if rows is not None and (holder is choice or int(choice.get("index", 0)) == 0):
                return rows
    return None


def _read_sglang(bodies: list[Any], request: str | None) -> RawAnswer:
    choices = []
    for index, body in enumerate(bodies):
        meta = body.get("meta_info") if isinstance(body, Mapping) else None
        if not isinstance(meta, Mapping):
            raise RoutesError(
                f"{request or 'answer'}: expected meta_info in part {index}, got "
                f"{type(body).__name__}"
            )
        request = request or meta.get("id")
        choices.append(_sglang_choice(index, body, meta))
    return RawAnswer(request or "answer", choices)


def _sglang_choice(index: int, body: Mapping[str, Any], meta: Mapping[str, Any]) -> RawChoice:
    token_ids = body.get("output_ids")
    return RawChoice(
        index=index,
        generated=meta.get("routed_experts"),
        layout="full",
        start=meta.get("routed_experts_start_len"),
        num_prompt=meta.get("prompt_tokens"),
        num_generated=len(token_ids) if token_ids is not None else meta.get("completion_tokens"),
        token_ids=token_ids,
        finish_reason=_reason(meta.get("finish_reason")),
        spans=_spans(meta.get("weight_versions"), meta.get("weight_version")),
    )


def _reason(value: Any) -> str | None:
    return value.get("type") if isinstance(value, Mapping) else value


def _spans(spans: Any, single: Any) -> list[tuple[str, int, int]] | None:
    if isinstance(spans, list) and spans and all(isinstance(span, Mapping) for span in spans):
        return [(str(span["version"]), int(span["start"]), int(span["end"])) for span in spans]
    return None if single is None else [(str(single), 0, -1)]
