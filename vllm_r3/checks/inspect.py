"""Expert load: how often each expert of each layer was chosen, and how evenly.

Reads rows from a rollout file (.pt), an array (.npy), an answer (.json) or a server. The table
needs numpy; the heat map matplotlib, the rollout file torch, both imported when needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_r3.adapters.slime import FIELD, held_rows
from vllm_r3.checks.connect import connect
from vllm_r3.checks.rollout import load_samples
from vllm_r3.client import RouteShape, decode_answer
from vllm_r3.client.shape import check_ids
from vllm_r3.errors import R3Error


@dataclass(frozen=True)
class ExpertLoad:
    """Counts (L, E) of choices, over `rows` rows of K choices each."""

    counts_LE: np.ndarray
    rows: int
    top_k: int

    def entropy(self) -> np.ndarray:
        """Entropy of each layer's load in bits; log2(E) is even, 0 a layer without routing."""
        share = self.counts_LE / np.maximum(1, self.counts_LE.sum(axis=1, keepdims=True))
        logs = np.log2(share, out=np.zeros_like(share), where=share > 0)
        return -(share * logs).sum(axis=1) + 0.0

    def lines(self) -> list[str]:
        """A table, one line a layer; busiest and idlest as multiples of an even load."""
        layers, experts = self.counts_LE.shape
        text = [f"{self.rows} rows, {layers} layers, {experts} experts, top-{self.top_k}"]
        text.append("layer  entropy  of even  busiest  idlest  unused  most chosen")
        even = np.log2(experts) if experts > 1 else 1.0
        for layer, (counts, bits) in enumerate(zip(self.counts_LE, self.entropy(), strict=True)):
            mean = max(1e-9, counts.mean())
            most = ", ".join(str(expert) for expert in np.argsort(-counts, kind="stable")[:3])
            text.append(
                f"{layer:5}  {bits:7.3f}  {bits / even:7.1%}  {counts.max() / mean:6.2f}x  "
                f"{counts.min() / mean:5.2f}x  {int((counts == 0).sum()):6}  {most}"
            )
        return text


def expert_load(arrays: Iterable[np.ndarray], shape: RouteShape) -> ExpertLoad:
    """Count choices over arrays (n, L, K); layers that do not route stay empty.

    Raises:
        R3Error: no rows, rows of different models, or ids outside [0, E).
    """
    arrays = [rows for rows in arrays if len(rows)]
    if not arrays:
        raise R3Error("expected rows to inspect, got none")
    sides = {rows.shape[1:] for rows in arrays}
    if len(sides) != 1:
        raise R3Error(f"expected rows of one model, got sides {sorted(sides)}")
    rows = np.concatenate(arrays)
    check_ids(rows, shape.num_experts, "rows")
    experts = shape.num_experts or int(rows.max()) + 1
    counts = np.zeros((rows.shape[1], experts), np.int64)
    for layer in range(len(counts)) if shape.moe_layers is None else shape.moe_layers:
        if shape.moe_layers is not None or rows[:, layer].any():
            counts[layer] = np.bincount(rows[:, layer].ravel(), minlength=experts)
    return ExpertLoad(counts, len(rows), rows.shape[2])


def read_rows(source: str, shape: RouteShape) -> tuple[list[np.ndarray], RouteShape]:
    """Read rows from a file or, for an address, from a request to the server there."""
    if "://" in source:
        server = connect(source)
        shape = shape.joined(server.shape, source)
        tokens = server.prompt(256, 64)
        rows = server.decode(server.generate(tokens, 64).good(), len(tokens), shape=shape).rows
        return [] if rows is None else [rows], shape
    path = Path(source)
    if not path.is_file():
        raise R3Error(f"{source}: expected a file or an address http://..., found neither")
    if path.suffix == ".json":
        answer = json.loads(path.read_text(encoding="utf-8"))
        found = [choice.rows for choice in decode_answer(answer, shape=shape)]
    elif path.suffix == ".npy":
        found = [np.load(path, allow_pickle=False)]
    else:
        found = [held_rows(sample.get(FIELD)) for sample in load_samples(path)]
    found = [rows for rows in found if rows is not None and rows.size]
    for rows in found:
        if rows.ndim != 3 or rows.dtype.kind not in "iu":
            raise R3Error(
                f"{source}: expected integer rows (rows, L, K), got {rows.dtype} {rows.shape}"
            )
    return found, shape


@contextmanager
def drawing(path: str | Path) -> Iterator[Any]:
    """Give axes to draw on, and save them as a PNG."""
    try:
        import matplotlib
    except ImportError as error:
        raise R3Error(f"drawing needs matplotlib ({error}): pip install 'vllm-r3[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    yield axes
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def heat_map(load: ExpertLoad, path: str | Path) -> None:
    """Draw the load, layers down and experts across, 1 being even, into a PNG."""
    mean = np.maximum(1e-9, load.counts_LE.mean(axis=1, keepdims=True))
    with drawing(path) as axes:
        image = axes.imshow(
            load.counts_LE / mean, aspect="auto", cmap="viridis", interpolation="nearest"
        )
        title = f"expert load over {load.rows} rows"
        axes.set(xlabel="expert", ylabel="decoder layer", title=title)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        axes.figure.colorbar(image, label="times an even load")
