"""Fold the chunks of a streamed answer into one answer that `decode_answer` takes.

Rows come whole on the chunk with a choice's finish reason; `prompt_routed_experts` on the first
such chunk only. SGLang repeats the whole answer so far in every chunk, so its last chunk is the
answer. It imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_r3.client.servers import SGLANG_EXTENSIONS
from vllm_r3.client.shape import INTEGER, INTEGERS, OBJECTS, RoutesError, take

BOTH = ("prompt_routed_experts", "prompt_token_ids", *SGLANG_EXTENSIONS)
CHOICE_FIELDS = (
    *(*BOTH, "routed_experts", "finish_reason"),
    *("weight_versions", "routed_experts_weight_versions"),
)
TOP_FIELDS = (*BOTH, "id", "request_id", "usage", "routed_experts_meta", "weight_version")


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
            found = type(chunk).__name__
            raise RoutesError(f"stream: expected chunks of JSON objects, got {found}")
        if "meta_info" in chunk:
            answer = dict(chunk)
            continue
        _update(answer, chunk, TOP_FIELDS)
        for part in take(chunk, "choices", OBJECTS, "stream") or []:
            index = take(part, "index", INTEGER, "stream") or 0
            choice = choices.setdefault(index, {"index": index})
            _update(choice, part, CHOICE_FIELDS)
            token_ids = take(part, "token_ids", INTEGERS, "stream")
            if token_ids is not None:
                choice.setdefault("token_ids", []).extend(token_ids)
    if "meta_info" in answer:
        return answer
    name = answer.get("request_id") or answer.get("id") or "stream"
    if not choices:
        raise RoutesError(f"{name}: expected chunks with choices, got none in {seen} chunks")
    unfinished = [at for at in sorted(choices) if choices[at].get("finish_reason") is None]
    if unfinished:
        raise RoutesError(
            f"{name}: the stream ended after {seen} chunks without a finish_reason for choices "
            f"{unfinished}"
        )
    return answer | {"choices": [choices[index] for index in sorted(choices)]}


def _update(target: dict[str, Any], source: Mapping[str, Any], names: Iterable[str]) -> None:
    target.update({name: source[name] for name in names if source.get(name) is not None})
