"""Compare routed-experts rows by value.

A cell is one (token, layer). Kernels may list the chosen experts in any order, so cells
are compared as sets, and must hold different ids. Needs numpy.

N rows, L decoder layers, K experts chosen, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vllm_r3.errors import R3Error


class RowsDiffer(R3Error):
    """Rows that are not what they should be; the message names the first bad cell."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """How much was compared: `cells` are those of MoE layers."""

    rows: int
    cells: int


def _check_form(
    where: str, found_NLK: np.ndarray, expected_NLK: np.ndarray, num_experts: int
) -> None:
    if found_NLK.shape != expected_NLK.shape:
        raise RowsDiffer(f"{where}: expected rows {expected_NLK.shape}, got {found_NLK.shape}")
    dtype = np.dtype("uint8" if num_experts <= 256 else "int16")
    if found_NLK.dtype != dtype:
        raise RowsDiffer(
            f"{where}: expected {dtype} for {num_experts} experts, got {found_NLK.dtype}"
        )


def _check_cells(
    where: str, found_NLK: np.ndarray, moe_layers: Sequence[int], num_experts: int
) -> None:
    """Dense layers are zero, MoE cells hold distinct ids in range."""
    dense = [layer for layer in range(found_NLK.shape[1]) if layer not in moe_layers]
    bad = np.argwhere(found_NLK[:, dense].any(axis=-1))
    if len(bad):
        row, layer = int(bad[0, 0]), dense[int(bad[0, 1])]
        raise RowsDiffer(
            f"{where}: row {row}, layer {layer} is dense: "
            f"expected zeros, got {found_NLK[row, layer].tolist()}"
        )
    ordered = np.sort(found_NLK[:, list(moe_layers)].astype(np.int64), axis=-1)
    repeated = (np.diff(ordered, axis=-1) == 0).any(axis=-1)
    outside = (ordered[..., 0] < 0) | (ordered[..., -1] >= num_experts)
    bad = np.argwhere(repeated | outside)
    if len(bad):
        row, layer = int(bad[0, 0]), moe_layers[int(bad[0, 1])]
        raise RowsDiffer(
            f"{where}: row {row}, layer {layer}: expected {found_NLK.shape[2]} different ids in "
            f"[0, {num_experts}), got {found_NLK[row, layer].tolist()}; "
            f"{len(bad)} cells are like this"
        )


def differing_cells(
    found_NLK: np.ndarray, expected_NLK: np.ndarray, moe_layers: Sequence[int]
) -> np.ndarray:
    """(D, 2) pairs of row and global layer whose sets of ids differ."""
    layers = list(moe_layers)
    found = np.sort(found_NLK[:, layers].astype(np.int64), axis=-1)
    expected = np.sort(expected_NLK[:, layers].astype(np.int64), axis=-1)
    bad = np.argwhere((found != expected).any(axis=-1))
    return (
        np.stack([bad[:, 0], np.asarray(layers)[bad[:, 1]]], axis=1)
        if len(bad)
        else np.zeros((0, 2), dtype=int)
    )


def compare_rows(
    found_NLK: np.ndarray,
    expected_NLK: np.ndarray,
    moe_layers: Sequence[int],
    num_experts: int,
    where: str = "rows",
    margins_NL: np.ndarray | None = None,
) -> Compared:
    """Check that two arrays of rows say the same.

    Args:
        found_NLK: what the engine returned.
        expected_NLK: what it should have, of any integer type.
        moe_layers: global numbers of the layers that route.
        num_experts: E, which decides the dtype.
        where: what to call the rows in a message.
        margins_NL: how clear each choice was, only to explain a difference.

    Raises:
        RowsDiffer: shape, dtype, a dense layer, an id or a choice is wrong.
    """
    _check_form(where, found_NLK, expected_NLK, num_experts)
    _check_cells(where, found_NLK, moe_layers, num_experts)
    cells = found_NLK.shape[0] * len(moe_layers)
    bad = differing_cells(found_NLK, expected_NLK, moe_layers)
    if len(bad):
        row, layer = (int(x) for x in bad[0])
        margin = "" if margins_NL is None else f" (margin {margins_NL[row, layer]:.2e})"
        raise RowsDiffer(
            f"{where}: row {row}, layer {layer}: "
            f"expected experts {sorted(expected_NLK[row, layer].tolist())}, "
            f"got {sorted(found_NLK[row, layer].tolist())}{margin}; "
            f"{len(bad)} of {cells} cells differ, "
            f"in {len(set(bad[:, 0].tolist()))} of {len(found_NLK)} rows"
        )
    return Compared(len(found_NLK), cells)
