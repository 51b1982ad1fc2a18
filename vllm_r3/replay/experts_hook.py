"""Watch and force the routers of a Hugging Face mixture-of-experts model.

In transformers 5 every MoE block calls its experts with (hidden, ids, weights), whatever router
stands before them. That call shows the model's own choice, and it is where recorded ids go in;
their weights are computed again from the router's full scores. How a family makes weights out of
scores is not looked up but found out: on the first pass the model's own ids and weights are at
hand, and the one rule that reproduces them is taken. A family that no rule reproduces is refused.
A correction bias steers only the choice, so it never enters the weights.

S tokens, T = S - 1 of them forwarded, L decoder layers, E experts, K top-k, V vocabulary. Needs
torch and transformers, imported when called.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_r3.errors import R3Error

if TYPE_CHECKING:
    import torch

# largest error, relative to a token's largest weight, of a rule that counts as the model's own
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-4, 2e-2


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        rows: int64 (T, L, K), what the experts were called with, zero in dense layers; the order
            in a row means nothing.
        margins: float32 (T, L), how far the last chosen expert's score is above the best one left
            out, negative where the family's groups bar a better one; infinite in dense layers.
        logits: float32 (T, V); row i scores the token after position i.
    """

    rows: np.ndarray
    margins: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class WeightRule:
    """How a router turns logits into the weights of the chosen experts."""

    score: str
    float_logits: bool
    normalise: bool
    scale: float

    def weights(self, hidden: torch.Tensor, gate: Any, ids_TK: torch.Tensor) -> torch.Tensor:
        """Compute the float32 weights (T, K) of these ids from all E scores."""
        logits_TE = _logits(hidden, gate, self.float_logits)
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
    scales: set[float]
    rule: WeightRule | None = None

    def force(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows_TK: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the recorded ids and their weights in the place of the model's own."""
        import torch

        if ids.shape != rows_TK.shape:
            raise R3Error(
                f"layer {self.layer}: expected rows {tuple(ids.shape)} for this pass, got "
                f"{rows_TK.shape}"
            )
        if self.rule is None:
            self.rule = _find_rule(self, hidden, ids, weights)
        mine = torch.from_numpy(np.ascontiguousarray(rows_TK, dtype=np.int64)).to(ids.device)
        made = self.rule.weights(hidden, self.gate, mine)
        return mine.to(ids.dtype), made.to(weights.dtype)


class HookedModel:
    """A causal language model whose routing is seen, and can be made to repeat recorded rows.

    Threads may share it: their passes run one after the other.

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
        self.num_layers: int = model.config.num_hidden_layers
        self._lock = threading.Lock()  # a hook sees the passes of all threads

    def run(self, tokens: Sequence[int], rows: np.ndarray | None = None) -> Pass:
        """Forward all but the last of `tokens`, freely or with token i going where rows[i] say."""
        import torch

        seen: dict[int, tuple[Any, Any]] = {}

        def hook(site: Site, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, ids, weights = inputs[:3]
            flat = hidden.reshape(-1, hidden.shape[-1])
            if rows is not None:
                ids, weights = site.force(flat, ids, weights, rows[:, site.layer])
            seen[site.layer] = ids.cpu().numpy(), _margins(flat, site.gate, ids).cpu().numpy()
            return hidden, ids, weights, *inputs[3:]

        with self._lock, torch.no_grad(), contextlib.ExitStack() as stack:
            for site in self.sites:
                handle = site.experts.register_forward_pre_hook(
                    lambda module, inputs, site=site: hook(site, inputs)
                )
                stack.callback(handle.remove)
            ids = torch.tensor([list(tokens[:-1])], device=self.model.device)
            logits = self.model(ids, use_cache=False).logits[0].float().cpu().numpy()
        if sorted(seen) != sorted(self.moe_layers):
            raise AssertionError(f"routers ran in {sorted(seen)}, not in {self.moe_layers}")
        count, top_k = len(tokens) - 1, seen[self.moe_layers[0]][0].shape[1]
        used = np.zeros((count, self.num_layers, top_k), np.int64)
        margins = np.full((count, self.num_layers), np.inf, np.float32)
        for layer, (chosen, margin) in seen.items():
            used[:, layer], margins[:, layer] = chosen, margin
        return Pass(used, margins, logits)


def load_model(model_dir: str, dtype: str, **options: Any) -> Any:
    """Load a causal language model of transformers, in evaluation mode."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise R3Error(
            f"replay needs torch and transformers ({error}): pip install 'vllm-r3[replay]'"
        ) from None
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, **options).eval()


def _sites(model: Any) -> Iterator[Site]:
    modules = dict(model.named_modules())
    for name, module in modules.items():
        found = re.search(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts$", name)
        block = modules[name.removesuffix(".experts")] if found else None
        gate = getattr(block, "gate", None) or getattr(block, "router", None)
        if found and getattr(gate, "weight", None) is not None:
            holders = (block, gate, model.config)
            named = (getattr(holder, "routed_scaling_factor", None) or 1.0 for holder in holders)
            yield Site(int(found.group(1)), module, gate, {*map(float, named), 1.0})


def _logits(hidden: torch.Tensor, gate: Any, wide: bool) -> torch.Tensor:
    import torch

    weight, bias = gate.weight, getattr(gate, "bias", None)
    if wide:
        hidden, weight = hidden.float(), weight.float()
        bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(hidden, weight, bias).float()


def _margins(hidden: torch.Tensor, gate: Any, ids: torch.Tensor) -> torch.Tensor:
    scores, correction = _logits(hidden, gate, True), getattr(gate, "e_score_correction_bias", None)
    if correction is not None:
        scores = scores.sigmoid() + correction
    left_out = scores.scatter(1, ids.long(), float("-inf"))
    return scores.gather(1, ids.long()).min(dim=1).values - left_out.max(dim=1).values


def _find_rule(
    site: Site, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> WeightRule:
    """Take the rule that makes the model's own weights out of its own ids."""
    import torch

    size = weights.float().abs().max().clamp_min(1e-20)
    errors = {}
    for made in itertools.product(
        ("softmax", "sigmoid"), (False, True), (True, False), site.scales
    ):
        rule = WeightRule(*made)
        off = rule.weights(hidden, site.gate, ids.long()) - weights.float()
        errors[rule] = float(off.abs().max() / size)
    best = min(errors, key=errors.__getitem__)
    exact = {weights.dtype, hidden.dtype} <= {torch.float32, torch.float64}
    if not errors[best] <= (TOLERANCE if exact else LOW_PRECISION_TOLERANCE):
        raise R3Error(
            f"layer {site.layer}: expected the router's weights from softmax or sigmoid scores, "
            f"got others (off by {errors[best]:.1e}): this family cannot be replayed"
        )
    return best
