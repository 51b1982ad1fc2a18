"""Put the segments of one choice together: one array (rows, L, K), checked against the token count.

    # rows of one answer; S = P + G
    # [0, start)    left out on request
    # [start, P)    prompt segment
    # [P, S - 1)    generated segment
    # S - 1         never forwarded, has no row

Two passes over the bytes in all: the base64 decoder's and, where two segments or another dtype
meet, the one into the result. It imports numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vllm_r3.client.shape import (
    MAX_EXPERTS,
    UINT8_MAX_EXPERTS,
    RoutesError,
    RouteShape,
    check_ids,
    dtype_for,
)


@dataclass(frozen=True)
class Count:
    """How many tokens one choice has, and from which row on it was asked to answer."""

    num_prompt: int
    num_generated: int
    start: int = 0

    @property
    def prompt_rows(self) -> int:
        """Rows [start, P), less the last token's where nothing was generated."""
        return max(0, min(self.num_prompt, self.num_tokens - 1) - self.start)

    @property
    def generated_rows(self) -> int:
        """Rows [P, S - 1)."""
        return max(0, self.num_generated - 1)

    @property
    def num_tokens(self) -> int:
        """S = P + G."""
        return self.num_prompt + self.num_generated

    @property
    def rows(self) -> int:
        """Rows [start, S - 1)."""
        return max(0, self.num_tokens - 1 - self.start)


def merge_segments(
    segments: list[np.ndarray | None],
    expected: list[int],
    shape: RouteShape,
    count: Count,
    where: str,
) -> np.ndarray:
    """Join segments of `decode_segment` in row order, each with its expected row count.

    Returns:
        A contiguous, writable array (sum of expected, L, K), uint8 or int16 by the dtype rule.

    Raises:
        RoutesError: a segment has other rows, layers, top-k or dtype, or an impossible id.
    """
    parts = [_with_sides(segment, shape, where) for segment in segments]
    shape = _learn_sides(parts, shape, where)
    found, sides = [len(part) for part in parts], (shape.num_layers or 0, shape.top_k or 0)
    if found != expected:
        raise RoutesError(
            f"{where}: expected rows {_describe(expected, sides)} for {count.num_tokens} tokens "
            f"from start {count.start}, got {_describe(found, sides)}"
        )
    parts = [part for part in parts if len(part)]
    for part in parts:
        check_ids(part, shape.num_experts, where)
    narrow = all(part.dtype == np.uint8 for part in parts)
    dtype = dtype_for(shape.num_experts or (UINT8_MAX_EXPERTS if narrow else MAX_EXPERTS))
    if len(parts) == 1 and parts[0].shape[1:] == sides:
        return np.require(parts[0], dtype, ("C", "W"))
    result = np.zeros((sum(expected), *sides), dtype)
    at = 0
    for part in parts:
        layers = slice(None) if part.shape[1] == sides[0] else list(shape.moe_layers or ())
        result[at : at + len(part), layers] = part
        at += len(part)
    return result


def _describe(rows: list[int], sides: tuple[int, int]) -> str:
    parts = f" (prompt {rows[0]} + generated {rows[1]})" if len(rows) == 2 else ""
    return f"{(sum(rows), *sides)}{parts}"


def _with_sides(segment: np.ndarray | None, shape: RouteShape, where: str) -> np.ndarray:
    """Give a flat segment its sides, and refuse other ranks and dtypes."""
    if segment is None:
        return np.zeros((0, 0, 0), np.uint8)
    if segment.dtype.kind not in "iu":
        raise RoutesError(f"{where}: expected integer expert ids, got dtype {segment.dtype}")
    if segment.ndim == 3:
        return segment
    if segment.ndim != 1:
        raise RoutesError(f"{where}: expected rows (rows, L, K), got shape {segment.shape}")
    size, layers, top_k = segment.size, shape.num_layers, shape.top_k
    if layers is None or top_k is None:
        raise RoutesError(
            f"{where}: {size} values came without a shape: give num_layers and top_k to read them"
        )
    if size % (layers * top_k):
        raise RoutesError(f"{where}: expected a multiple of {layers} x {top_k} values, got {size}")
    return segment.reshape(-1, layers, top_k)


def _learn_sides(parts: list[np.ndarray], shape: RouteShape, where: str) -> RouteShape:
    """Learn unknown sides from the data and hold the data against known ones."""
    for part in parts:
        layers, top_k = part.shape[1:]
        if layers == top_k == 0:
            continue
        shape = replace(shape, num_layers=shape.num_layers or layers, top_k=shape.top_k or top_k)
        fitting = (shape.num_layers, len(shape.moe_layers or ()))
        if top_k != shape.top_k or layers not in fitting:
            hint = "; a server that sends MoE layers only needs moe_layers given"
            hint = "" if shape.moe_layers or layers in fitting else hint
            raise RoutesError(
                f"{where}: expected {shape.num_layers} layers and top_k {shape.top_k}, got shape "
                f"{part.shape}{hint}"
            )
    return shape
