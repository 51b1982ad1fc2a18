"""Force recorded expert ids into the routers of a Hugging Face mixture-of-experts model.

In transformers 5 every MoE block calls its experts with (hidden, ids, weights), whatever router
stands before them. That call is where the recorded ids go in; their weights are computed again from
the router's full scores. How a family makes weights out of scores is not looked up but found out:
on the first pass the model's own ids and weights are at hand, and the one rule that reproduces them
is taken. A family that no rule reproduces is refused. A correction bias steers only the choice, so
it never enters the weights. T tokens, E experts, K top-k. Needs torch, imported when called.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_r3.errors import R3Error

if TYPE_CHECKING:
    import torch

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# largest error, relative to a token's largest weight, of a rule that counts as the model's own
TOLERANCE = {"torch.float32": 1e-4, "torch.float64": 1e-4}
LOW_PRECISION_TOLERANCE = 2e-2


@dataclass(frozen=True)
class WeightRule:
    """How a router turns logits into the weights of the chosen experts."""

    score: str
    float_logits: bool
    normalise: bool
    scale: float

    def weights(self, hidden: torch.Tensor, gate: Any, ids_TK: torch.Tensor) -> torch.Tensor:
        """Compute the float32 weights (T, K) of these ids from all E scores."""
        import torch

        weight, bias = gate.weight, getattr(gate, "bias", None)
        if self.float_logits:
            hidden, weight = hidden.float(), weight.float()
            bias = None if bias is None else bias.float()
        logits_TE = torch.nn.functional.linear(hidden, weight, bias).float()
        scores_TE = logits_TE.sigmoid() if self.score == "sigmoid" else logits_TE.softmax(dim=-1)
        chosen = scores_TE.gather(1, ids_TK)
        if self.normalise:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen * self.scale


@dataclass
class Site:
    """One MoE block: its layer, its experts module, its gate, and its rule once known."""

    layer: int
    experts: Any
    gate: Any
    scales: tuple[float, ...]
    rule: WeightRule | None = None


class ForcedRouting:
    """A model whose routers can be made to repeat recorded rows.

    Attributes:
        moe_layers: global numbers of the layers that route.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.sites = list(_sites(model))
        if not self.sites:
            raise R3Error(
                f"{type(model).__name__}: expected MoE blocks with a gate and experts, found none"
            )
        self.moe_layers = [site.layer for site in self.sites]

    @contextmanager
    def forced(self, rows: np.ndarray) -> Iterator[None]:
        """Within the block, token i of a batch of one goes to the experts of rows[i] (T, L, K)."""
        import torch

        handles = []
        try:
            for site in self.sites:
                ids = torch.from_numpy(np.ascontiguousarray(rows[:, site.layer], dtype=np.int64))
                handles.append(site.experts.register_forward_pre_hook(_hook(site, ids)))
            yield
        finally:
            for handle in handles:
                handle.remove()


def _sites(model: Any) -> Iterator[Site]:
    modules = dict(model.named_modules())
    for name, module in modules.items():
        found = LAYER.search(name)
        if not name.endswith(".experts") or found is None:
            continue
        block = modules[name.removesuffix(".experts")]
        gate = getattr(block, "gate", None) or getattr(block, "router", None)
        if gate is not None and getattr(gate, "weight", None) is not None:
            yield Site(int(found.group(1)), module, gate, _scales(block, gate, model.config))


def _scales(*holders: Any) -> tuple[float, ...]:
    named = [getattr(holder, "routed_scaling_factor", None) for holder in holders]
    return tuple(dict.fromkeys([*(float(scale) for scale in named if scale is not None), 1.0]))


def _hook(site: Site, ids: torch.Tensor) -> Any:
    def force(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, own_ids, own_weights = inputs[:3]
        flat = hidden.reshape(-1, hidden.shape[-1])
        if own_ids.shape != ids.shape:
            raise R3Error(
                f"layer {site.layer}: expected rows {tuple(own_ids.shape)} for this pass, got "
                f"{tuple(ids.shape)}"
            )
        if site.rule is None:
            site.rule = _find_rule(site, flat, own_ids, own_weights)
        mine = ids.to(own_ids.device)
        weights = site.rule.weights(flat, site.gate, mine)
        return (hidden, mine.to(own_ids.dtype), weights.to(own_weights.dtype), *inputs[3:])

    return force


def _find_rule(
    site: Site, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> WeightRule:
    """Take the rule that makes the model's own weights out of its own ids."""
    best, error = None, float("inf")
    size = weights.float().abs().max().clamp_min(1e-20)
    for score, wide, normalise, scale in itertools.product(
        ("softmax", "sigmoid"), (False, True), (True, False), site.scales
    ):
        rule = WeightRule(score, wide, normalise, scale)
        made = rule.weights(hidden, site.gate, ids.long())
        off = float((made - weights.float()).abs().max() / size)
        if off < error:
            best, error = rule, off
    limit = TOLERANCE.get(str(weights.dtype), LOW_PRECISION_TOLERANCE)
    if hidden.dtype not in _wide_types():
        limit = max(limit, LOW_PRECISION_TOLERANCE)
    if best is None or error > limit:
        raise R3Error(
            f"layer {site.layer}: expected the router's weights from softmax or sigmoid scores, "
            f"got others (off by {error:.1e}): this family cannot be replayed"
        )
    return best


def _wide_types() -> tuple[Any, ...]:
    import torch

    return (torch.float32, torch.float64)
