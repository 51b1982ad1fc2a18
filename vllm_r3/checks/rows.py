"""The one judge of rows: what no router can have chosen, and where two arrays of rows differ.

A cell is one (row, layer). Kernels may list the chosen experts in any order, so cells are compared
as sets. All findings are reported, not the first alone. It imports numpy only.

N rows, L decoder layers, K experts chosen, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_r3.client.shape import RouteShape, dtype_for
from vllm_r3.errors import R3Error

# one expert a token may be expert 0 by chance; this many in a row are not
K1_ZERO_ROWS = 16


class RowsDiffer(R3Error):
    """Rows that are not what they should be; the message names the first bad cell."""


@dataclass(frozen=True)
class Compared:
    """How much was compared: `cells` are those of MoE layers."""

    rows: int
    cells: int


def differing_cells(a_NLK: np.ndarray, b_NLK: np.ndarray) -> np.ndarray:
    """Mark the cells (N, L) that hold different sets of experts."""
    return (np.sort(a_NLK, axis=-1) != np.sort(b_NLK, axis=-1)).any(axis=-1)


def repeating_cells(rows_NLK: np.ndarray) -> np.ndarray:
    """Mark the cells (N, L) that name an expert twice."""
    ordered = np.sort(rows_NLK, axis=-1)
    return (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)


def compare_rows(
    found_NLK: np.ndarray,
    expected_NLK: np.ndarray,
    shape: RouteShape,
    where: str = "rows",
    margins_NL: np.ndarray | None = None,
    max_differing: float = 0.0,
) -> Compared:
    """Check that two arrays of rows say the same, and that the found ones are possible.

    Args:
        expected_NLK: what should have been found, of any integer type.
        shape: moe_layers (None: all) and num_experts, which decides the dtype.
        where: what to call the rows in a message.
        margins_NL: how clear each choice was, only to explain a difference.
        max_differing: the share of MoE cells that may differ.

    Raises:
        RowsDiffer: shape, dtype, a dense layer, an id or a choice is wrong.
    """
    if found_NLK.shape != expected_NLK.shape:
        raise RowsDiffer(f"{where}: expected rows {expected_NLK.shape}, got {found_NLK.shape}")
    if shape.num_experts and found_NLK.dtype != dtype_for(shape.num_experts):
        raise RowsDiffer(
            f"{where}: expected {dtype_for(shape.num_experts)} for {shape.num_experts} experts, "
            f"got {found_NLK.dtype}"
        )
    problems = find_problems(found_NLK, shape)
    if problems:
        raise RowsDiffer("\n".join(f"{where}: {kind}: {what}" for kind, what in problems.items()))
    differ_NL = differing_cells(found_NLK, expected_NLK)
    cells = len(found_NLK) * len(_moe_layers(found_NLK, shape))
    if differ_NL.sum() > max_differing * cells:
        row, layer = np.argwhere(differ_NL)[0].tolist()
        found, expected = (sorted(rows[row, layer].tolist()) for rows in (found_NLK, expected_NLK))
        margin = "" if margins_NL is None else f" (margin {margins_NL[row, layer]:.2e})"
        raise RowsDiffer(
            f"{where}: row {row}, layer {layer}: expected experts {expected}, got {found}{margin}; "
            f"{differ_NL.sum()} of {cells} cells differ, in {differ_NL.any(axis=1).sum()} of "
            f"{len(found_NLK)} rows"
        )
    return Compared(len(found_NLK), cells)


def find_problems(rows_NLK: np.ndarray, shape: RouteShape) -> dict[str, str]:
    """Say what is wrong with rows, by kind; nothing means that they can be replayed."""
    if rows_NLK.size == 0:
        return {}
    problems = {}
    layers, experts = _moe_layers(rows_NLK, shape), shape.num_experts
    bad = (rows_NLK < 0) | (rows_NLK >= (experts or np.inf))
    if bad.any():
        row, layer, place = np.argwhere(bad)[0].tolist()
        problems["out of range"] = (
            f"{bad.sum()} ids outside [0, {experts or 'E'}), the first "
            f"{rows_NLK[row, layer, place]} at row {row}, layer {layer}"
        )
    zero = _zero_cells(rows_NLK, layers)
    whole = zero.all(axis=0)
    if whole.any():
        named = np.asarray(layers)[whole].tolist()
        some = shape.moe_layers is None and not whole.all()
        hint = "; if these are dense, give --moe-layers" if some else ""
        problems["zero MoE layer"] = f"layers {spans(named)} of {len(layers)} are all zeros{hint}"
    partial = np.flatnonzero(zero[:, ~whole].any(axis=1)).tolist()
    if partial:
        problems["zero rows"] = f"{len(partial)} of {len(zero)} rows hold zeros: {spans(partial)}"
    double = repeating_cells(rows_NLK[:, layers]) & ~zero
    if double.any():
        row, at = np.argwhere(double)[0].tolist()
        problems["duplicate ids"] = (
            f"{double.sum()} cells name an expert twice, the first at row {row}, "
            f"layer {layers[at]}: {rows_NLK[row, layers[at]].tolist()}"
        )
    dense = sorted(set(range(rows_NLK.shape[1])) - set(layers))
    wrong = [layer for layer in dense if rows_NLK[:, layer].any()]
    if wrong:
        problems["dense layer not zero"] = (
            f"layers {spans(wrong)} are not among the MoE layers, but hold ids"
        )
    return problems


def _moe_layers(rows: np.ndarray, shape: RouteShape) -> list[int]:
    return list(range(rows.shape[1])) if shape.moe_layers is None else list(shape.moe_layers)


def _zero_cells(rows: np.ndarray, layers: list[int]) -> np.ndarray:
    """Mark (row, MoE layer) cells that cannot be a choice: all zeros."""
    zero = ~rows[:, layers].any(axis=2)
    return zero if rows.shape[2] > 1 else zero & zero.all(axis=0) & (len(rows) >= K1_ZERO_ROWS)


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
