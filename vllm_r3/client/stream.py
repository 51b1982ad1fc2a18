"""Fold the chunks of a streamed answer into one answer that `decode_answer` takes.

Rows come whole on the chunk with a choice's finish reason; `prompt_routed_experts` on the first
such chunk only. SGLang repeats the whole answer so far in every chunk, so its last chunk is the
answer. It imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_r3.client.fields import RoutesError, integer, integers, objects

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
        if not isinstance(chunk, Mapping):
            raise RoutesError(
                f"stream: expected chunks of JSON objects, got {type(chunk).__name__}"
            )
        if "meta_info" in chunk:
            answer = dict(chunk)
            continue
        _take(answer, chunk, TOP_FIELDS)
        for part in objects(chunk, "choices", "stream"):
            index = integer(part, "index", "stream") or 0
            _grow(choices.setdefault(index, {"index": index}), part)
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
    _take(choice, part, CHOICE_FIELDS)
    token_ids = integers(part, "token_ids", "stream")
    if token_ids is not None:
        choice.setdefault("token_ids", []).extend(token_ids)
