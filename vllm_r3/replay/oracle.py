"""Which experts a model should choose, from Hugging Face transformers in float32.

Runs one plain forward pass over a whole token sequence, with hooks on the routers, and
shares no code with the engine or its capture: what both agree on is right. Needs torch
and transformers, imported lazily.

S tokens, L decoder layers, K experts chosen, E experts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_r3.errors import R3Error


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the oracle says about one sequence.

    Attributes:
        rows: int64 (S - 1, L, K), zero in dense layers; the order in a row means nothing.
        margins: float32 (S - 1, L), how far the last chosen expert's score is above the
            best one left out; infinite in dense layers.
        logits: float32 (S - 1, V); row i scores the token after position i.
    """

    rows: np.ndarray
    margins: np.ndarray
    logits: np.ndarray


def _from_router(logits: Any, ids: Any) -> tuple[Any, Any]:
    left_out = logits.float().scatter(1, ids, float("-inf"))
    margin = logits.float().gather(1, ids).min(dim=1).values - left_out.max(dim=1).values
    return ids, margin


def _softmax_router(module: Any, args: tuple[Any, ...], out: Any) -> tuple[Any, Any]:
    """Routers that return (logits, weights, ids)."""
    return _from_router(out[0], out[2])


def _llama4_router(module: Any, args: tuple[Any, ...], out: Any) -> tuple[Any, Any]:
    """Returns (scores, logits): the chosen ones are those with a score."""
    return _from_router(out[1], out[0].topk(module.top_k, dim=1).indices)


def _routed_experts(module: Any, args: tuple[Any, ...], out: Any) -> tuple[Any, Any]:
    """Expert modules that are called with (hidden, ids, weights): the router is a function."""
    import torch

    return args[1], torch.full(args[1].shape[:1], float("nan"))


Reader = Callable[[Any, tuple[Any, ...], Any], tuple[Any, Any]]

# model_type -> (the hooked module's path inside a decoder layer, how to read it)
ROUTERS: dict[str, tuple[str, Reader]] = {
    "mixtral": ("mlp.gate", _softmax_router),
    "olmoe": ("mlp.gate", _softmax_router),
    "qwen2_moe": ("mlp.gate", _softmax_router),
    "qwen3_moe": ("mlp.gate", _softmax_router),
    "qwen3_next": ("mlp.gate", _softmax_router),
    "gpt_oss": ("mlp.router", _softmax_router),
    "exaone_moe": ("mlp.experts", _routed_experts),
    "glm4_moe": ("mlp.experts", _routed_experts),
    "deepseek_v3": ("mlp.experts", _routed_experts),
    "llama4_text": ("feed_forward.router", _llama4_router),
}


class Oracle:
    """A model loaded once, asked for the truth about many sequences."""

    def __init__(self, model_dir: str, device: str = "cpu") -> None:
        """Load `model_dir` in float32 on a torch device.

        Raises:
            R3Error: torch or transformers is missing, or the family has no known router.
        """
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise R3Error(
                f"the oracle needs torch and transformers ({error}); install vllm-r3[demo]"
            ) from None
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
        ).eval()
        if device != "cpu":
            self.model.to(device)
            self.model.set_experts_implementation("eager")  # its grouped kernels want bfloat16
        self.num_layers: int = self.model.config.num_hidden_layers
        self._seen: dict[int, tuple[Any, Any]] = {}
        self.moe_layers = self._hook_routers()

    def _hook_routers(self) -> list[int]:
        family = self.model.config.model_type
        if family not in ROUTERS:
            raise R3Error(
                f"the oracle knows no router of model type {family!r}, only of {', '.join(ROUTERS)}"
            )
        path, reader = ROUTERS[family]
        found = []
        for number, layer in enumerate(self.model.model.layers):
            module: Any = layer
            for name in path.split("."):
                module = getattr(module, name, None)
            if module is not None:
                module.register_forward_hook(self._hook(number, reader))
                found.append(number)
        if not found:
            raise R3Error(f"no decoder layer of this {family!r} model has a router at {path!r}")
        return found

    def _hook(self, number: int, reader: Reader) -> Callable[[Any, Any, Any], None]:
        def remember(module: Any, args: Any, out: Any) -> None:
            self._seen[number] = reader(module, args, out)

        return remember

    def truth(self, tokens: Sequence[int]) -> Truth:
        """Forward all but the last of `tokens` (S of them) and read every router."""
        import torch

        self._seen.clear()
        with torch.no_grad():
            ids = torch.tensor([list(tokens[:-1])], device=self.model.device)
            logits = self.model(ids, use_cache=False).logits[0]
        if sorted(self._seen) != self.moe_layers:
            raise AssertionError(f"routers ran in {sorted(self._seen)}, not in {self.moe_layers}")
        n, k = len(tokens) - 1, self._seen[self.moe_layers[0]][0].shape[-1]
        rows = np.zeros((n, self.num_layers, k), dtype=np.int64)
        margins = np.full((n, self.num_layers), np.inf, dtype=np.float32)
        for layer, (chosen, margin) in self._seen.items():
            rows[:, layer] = chosen.cpu().numpy()
            margins[:, layer] = margin.cpu().numpy()
        return Truth(rows, margins, logits.float().cpu().numpy())
