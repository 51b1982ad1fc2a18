"""Fold the chunks of a streamed answer into one answer that `decode_answer` takes.

Rows come whole on the chunk with a choice's finish reason; `prompt_routed_experts` on the first
such chunk only. SGLang repeats the whole answer so far in every chunk, so its last chunk is the
answer. It imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_r3.routes.rules import RoutesError

CHOICE_FIELDS = (
    "routed_experts",
    "prompt_routed_experts",
    "prompt_token_ids",
    "finish_reason",
    "weight_versions",
    "sglext",
    "sgl_ext",
)
TOP_FIELDS = (
    "id",
    "request_id",
    "usage",
    "prompt_routed_experts",
    "prompt_token_ids",
    "routed_experts_meta",
    "weight_version",
    "sglext",
    "sgl_ext",
)


def collect_stream(chunks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Fold parsed chunks (the `data:` lines without `[DONE]`) into the answer they amount to.

    Raises:
        RoutesError: the stream held no chunk, or ended before every choice had finished.
    """
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    seen = 0
    for chunk in chunks:
        seen += 1
        if "meta_info" in chunk:
            answer = dict(chunk)
            continue
        _take(answer, chunk, TOP_FIELDS)
        for part in chunk.get("choices") or []:
            _grow(choices.setdefault(int(part.get("index", 0)), {}), part)
    if "meta_info" in answer:
        return answer
    return _finished(answer, choices, seen)


def _finished(
    answer: dict[str, Any], choices: dict[int, dict[str, Any]], seen: int
) -> dict[str, Any]:
    name = answer.get("request_id") or answer.get("id") or "stream"
    if not choices:
        raise RoutesError(f"{name}: expected chunks with choices, got none in {seen} chunks")
    open_ones = [
        index for index, choice in sorted(choices.items()) if choice.get("finish_reason") is None
    ]
    if open_ones:
        raise RoutesError(
            f"{name}: the stream ended after {seen} chunks without a finish_reason for choices "
            f"{open_ones}"
        )
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer


def _take(target: dict[str, Any], source: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if source.get(name) is not None:
            target[name] = source[name]


def _grow(choice: dict[str, Any], part: Mapping[str, Any]) -> None:
    choice["index"] = int(part.get("index", 0))
    _take(choice, part, CHOICE_FIELDS)
    if part.get("token_ids") is not None:
        choice.setdefault("token_ids", []).extend(part["token_ids"])
