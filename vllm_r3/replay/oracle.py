"""Which experts a model should choose, from Hugging Face transformers in float32.

Runs one plain forward pass over a whole token sequence, with hooks where the routers hand their
choice to the experts, and shares no code with the engine or its capture: what both agree on is
right. Needs torch and transformers, imported when called.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_r3.client import RouteShape
from vllm_r3.replay.experts_hook import HookedModel, Pass, load_model

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Oracle(HookedModel):
    """A model loaded once, asked for the truth about many sequences.

    Attributes:
        shape: what `checks.rows` must know to judge rows of this model.
    """

    def __init__(self, model_dir: str, device: str = "cpu") -> None:
        """Load `model_dir` in float32 on a torch device.

        Raises:
            R3Error: torch or transformers is missing, or the family's routers are not found.
        """
        super().__init__(
            load_model(model_dir, "float32", attn_implementation="eager", local_files_only=True)
        )
        if device != "cpu":
            self.model.to(device)
            self.model.set_experts_implementation("eager")  # its grouped kernels want bfloat16
        config = self.model.config
        experts = next(getattr(config, name) for name in EXPERT_COUNTS if hasattr(config, name))
        moe_layers = tuple(self.moe_layers)
        self.shape = RouteShape(self.num_layers, num_experts=experts, moe_layers=moe_layers)

    def truth(self, tokens: Sequence[int]) -> Pass:
        """Forward all but the last of `tokens` and read every router."""
        return self.run(tokens)
