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

from vllm_r3.client.shape import RoutesError, RouteShape, dtype_for


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

    def check(self, where: str) -> None:
        """Refuse a start outside [0, P] and negative counts."""
        if self.num_prompt < 0 or self.num_generated < 0:
            raise RoutesError(
                f"{where}: token counts must be 0 or more, got {self.num_prompt} + "
                f"{self.num_generated}"
            )
        if not 0 <= self.start <= self.num_prompt:
            raise RoutesError(f"{where}: start must be in [0, {self.num_prompt}], got {self.start}")


def merge_segments(
    segments: list[np.ndarray | None],
    expected: list[int],
    shape: RouteShape,
    count: Count,
    where: str,
) -> np.ndarray:
    """Join decoded segments in order.

    Args:
        segments: arrays of `decode_segment`, in row order.
        expected: the row count that each must have.
        shape: what is known of the model.
        count: the token counts, for the message.
        where: names request and choice in errors.

    Returns:
        A contiguous, writable array (sum of expected, L, K), uint8 or int16 by the dtype rule.

    Raises:
        RoutesError: a segment has another row count, layer count, top-k or dtype, or an impossible
            id.
    """
    parts = [_shaped(segment, shape, where) for segment in segments]
    shape = _settle(parts, shape, where)
    for part, rows in zip(parts, expected, strict=True):
        found = 0 if part is None else len(part)
        if found != rows:
            raise RoutesError(_count_message(parts, expected, shape, count, where))
    full = [part for part in parts if part is not None and len(part)]
    for part in full:
        check_ids(part, shape, where)
    return _joined(full, sum(expected), shape)


def _count_message(
    parts: list[np.ndarray | None], expected: list[int], shape: RouteShape, count: Count, where: str
) -> str:
    found = [0 if part is None else len(part) for part in parts]
    sides = (shape.num_layers or 0, shape.top_k or 0)
    split = f" (prompt {expected[0]} + generated {expected[1]})" if len(parts) == 2 else ""
    got = f" (prompt {found[0]} + generated {found[1]})" if len(parts) == 2 else ""
    return (
        f"{where}: expected rows {(sum(expected), *sides)}{split} for {count.num_tokens} tokens "
        f"from start {count.start}, got {(sum(found), *sides)}{got}"
    )


def _shaped(segment: np.ndarray | None, shape: RouteShape, where: str) -> np.ndarray | None:
    """Give a flat segment its sides, and refuse other ranks and dtypes."""
    if segment is None:
        return None
    if segment.dtype.kind not in "iu":
        raise RoutesError(f"{where}: expected integer expert ids, got dtype {segment.dtype}")
    if segment.ndim == 1:
        return _with_sides(segment, shape, where)
    if segment.ndim != 3:
        raise RoutesError(
            f"{where}: expected rows [rows, layers, top_k], got shape {segment.shape}"
        )
    return segment


def _with_sides(flat: np.ndarray, shape: RouteShape, where: str) -> np.ndarray:
    if shape.num_layers is None or shape.top_k is None:
        raise RoutesError(
            f"{where}: {flat.size} values came without a shape: give num_layers and top_k to read "
            "them"
        )
    side = shape.num_layers * shape.top_k
    if flat.size % side:
        raise RoutesError(
            f"{where}: expected a multiple of {shape.num_layers} x {shape.top_k} values, got "
            f"{flat.size}"
        )
    return flat.reshape(-1, shape.num_layers, shape.top_k)


def _settle(parts: list[np.ndarray | None], shape: RouteShape, where: str) -> RouteShape:
    """Learn unknown sides from the data and hold the data against known ones."""
    for part in parts:
        if part is None or part.shape[1:] == (0, 0):
            continue
        layers, top_k = part.shape[1:]
        if shape.top_k not in (None, top_k):
            raise RoutesError(
                f"{where}: expected top_k {shape.top_k}, got {top_k} in shape {part.shape}"
            )
        if shape.num_layers is None:
            shape = replace(shape, num_layers=layers)
        elif layers != shape.num_layers and layers != len(shape.moe_layers or ()):
            hint = (
                ""
                if shape.moe_layers
                else "; a server that sends MoE layers only needs moe_layers given"
            )
            raise RoutesError(
                f"{where}: expected {shape.num_layers} layers, got {layers} in shape "
                f"{part.shape}{hint}"
            )
        shape = replace(shape, top_k=top_k)
    return shape


def check_ids(part: np.ndarray, shape: RouteShape, where: str) -> None:
    """Refuse ids outside [0, E), or below 0 where E is unknown."""
    limit = shape.num_experts if shape.num_experts is not None else np.iinfo(np.int16).max + 1
    if part.dtype == np.uint8 and limit > np.iinfo(np.uint8).max:
        return
    if int(part.max()) < limit and (part.dtype.kind == "u" or int(part.min()) >= 0):
        return
    row, layer, place = (int(n) for n in np.argwhere((part < 0) | (part >= limit))[0])
    raise RoutesError(
        f"{where}: expected expert ids in [0, {limit}), got {int(part[row, layer, place])} "
        f"at row {row}, layer {layer}"
    )


def _joined(parts: list[np.ndarray], rows: int, shape: RouteShape) -> np.ndarray:
    sides = (shape.num_layers or 0, shape.top_k or 0)
    dtype = _result_dtype(parts, shape)
    if len(parts) == 1 and _ready(parts[0], sides, dtype):
        return parts[0]
    whole = all(part.shape[1] == sides[0] for part in parts)
    result = (np.empty if whole else np.zeros)((rows, *sides), dtype)
    at = 0
    for part in parts:
        target = result[at : at + len(part)]
        if part.shape[1] == sides[0]:
            target[...] = part
        else:
            target[:, list(shape.moe_layers or ())] = part
        at += len(part)
    return result


def _ready(part: np.ndarray, sides: tuple[int, int], dtype: np.dtype) -> bool:
    flags = part.flags
    return (
        part.shape[1:] == sides and part.dtype == dtype and flags.writeable and flags.c_contiguous
    )


def _result_dtype(parts: list[np.ndarray], shape: RouteShape) -> np.dtype:
    if shape.num_experts is not None:
        return dtype_for(shape.num_experts)
    narrow = all(part.dtype == np.uint8 for part in parts)
    return np.dtype(np.uint8 if narrow else np.int16)
