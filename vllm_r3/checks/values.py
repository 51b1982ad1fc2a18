"""What is wrong with rows of the right shape: impossible, doubled or missing experts.

n rows, L layers, K top-k. All findings are reported, not the first alone. It imports numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vllm_r3.client.shape import RouteShape

OUT_OF_RANGE = "out of range"
DUPLICATE = "duplicate ids"
ZERO_LAYER = "zero MoE layer"
ZERO_ROWS = "zero rows"
DENSE = "dense layer not zero"
# one expert a token may be expert 0 by chance; this many in a row are not
K1_ZERO_ROWS = 16


@dataclass(frozen=True)
class Problem:
    """One finding: its kind and, in words, where and what."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


def find_problems(rows: np.ndarray, shape: RouteShape) -> list[Problem]:
    """List everything wrong with rows (n, L, K); an empty list means that they can be replayed."""
    if rows.size == 0:
        return []
    layers = list(range(rows.shape[1])) if shape.moe_layers is None else list(shape.moe_layers)
    zero = _zero_cells(rows, layers)
    return [
        *_out_of_range(rows, shape),
        *_zeros(zero, layers, rows.shape[2]),
        *_duplicates(rows, layers, zero),
        *_dense(rows, layers),
    ]


def _out_of_range(rows: np.ndarray, shape: RouteShape) -> Iterable[Problem]:
    limit = np.inf if shape.num_experts is None else shape.num_experts
    bad = (rows < 0) | (rows >= limit)
    if bad.any():
        row, layer, place = (int(n) for n in np.argwhere(bad)[0])
        most = "E" if shape.num_experts is None else shape.num_experts
        yield Problem(
            OUT_OF_RANGE,
            f"{int(bad.sum())} ids outside [0, {most}), the first {int(rows[row, layer, place])} "
            f"at row {row}, layer {layer}",
        )


def _zero_cells(rows: np.ndarray, layers: list[int]) -> np.ndarray:
    """Mark (row, MoE layer) cells that cannot be a choice: all zeros."""
    zero = ~rows[:, layers].any(axis=2)
    if rows.shape[2] > 1:
        return zero
    return zero & (zero.all(axis=0) & (len(rows) >= K1_ZERO_ROWS))


def _zeros(zero: np.ndarray, layers: list[int], top_k: int) -> Iterable[Problem]:
    if not zero.any():
        return
    whole = zero.all(axis=0)
    if whole.any():
        named = [layer for layer, empty in zip(layers, whole, strict=True) if empty]
        hint = "; if these are dense, give --moe-layers" if len(named) < len(layers) else ""
        yield Problem(ZERO_LAYER, f"layers {spans(named)} of {len(layers)} are all zeros{hint}")
    partial = zero[:, ~whole].any(axis=1) if not whole.all() else np.zeros(len(zero), bool)
    if partial.any():
        named = np.flatnonzero(partial).tolist()
        yield Problem(ZERO_ROWS, f"{len(named)} of {len(zero)} rows hold zeros: {spans(named)}")


def _duplicates(rows: np.ndarray, layers: list[int], zero: np.ndarray) -> Iterable[Problem]:
    ordered = np.sort(rows[:, layers], axis=2)
    double = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2) & ~zero
    if double.any():
        row, at = (int(n) for n in np.argwhere(double)[0])
        yield Problem(
            DUPLICATE,
            f"{int(double.sum())} cells name an expert twice, the first at row {row}, "
            f"layer {layers[at]}: {rows[row, layers[at]].tolist()}",
        )


def _dense(rows: np.ndarray, layers: list[int]) -> Iterable[Problem]:
    dense = sorted(set(range(rows.shape[1])) - set(layers))
    wrong = [layer for layer in dense if rows[:, layer].any()]
    if wrong:
        yield Problem(DENSE, f"layers {spans(wrong)} are not among the MoE layers, but hold ids")


def spans(numbers: list[int], most: int = 6) -> str:
    """Write sorted numbers as ranges, the first few of them: `0-95, 97`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    text = [str(first) if first == last else f"{first}-{last}" for first, last in found[:most]]
    return ", ".join(text) + (", ..." if len(found) > most else "")
