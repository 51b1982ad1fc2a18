"""A modular MoE kernel for the CPU, in place of the monolithic one of the CPU build.

With it a MoE layer takes the way that it takes on CUDA: vLLM's router chooses for the tokens of
this rank, its top-k kernel writes into the memory that capture hands out, and vLLM's naive
prepare/finalize then dispatches the chosen ids. Plain torch stands in for the two CUDA kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from data_parallel_worker import note
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.v1.worker.workspace import init_workspace_manager

_SCHEMA = (
    "topk_softmax(Tensor(a!) weights, Tensor(b!) ids, Tensor(c!) positions, "
    "Tensor logits, bool renormalize, Tensor? bias) -> ()"
)
_library: torch.library.Library | None = None


class TorchExperts(mk.FusedMoEExpertsModular):
    """Gated experts, one after the other, of those that this rank has."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Tokens in rows."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value == "silu"

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def supports_expert_map(self) -> bool:
        """Global ids are turned into local ones here."""
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        """The sum over a token's experts is done here."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *args: Any) -> Any:
        """Only the output, one row a token."""
        return (M, K), (M, K), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Add up what this rank's experts make of the tokens that chose them."""
        ids = topk_ids.long()
        ids = ids if expert_map is None else expert_map[ids]
        output.zero_()
        for expert in range(len(w1)):
            weights = torch.where(ids == expert, topk_weights, 0.0).sum(dim=1)
            (chose,) = weights.nonzero(as_tuple=True)
            gate, up = (hidden_states[chose] @ w1[expert].T).chunk(2, dim=-1)
            made = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
            output[chose] += made * weights[chose, None]


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None = None,
) -> None:
    """What the CUDA kernel of this name writes to `weights` and `ids`."""
    assert bias is None
    # memory that capture hands out is part of a larger buffer
    note("routed", in_place=ids.untyped_storage().nbytes() > ids.nbytes)
    chosen, at = logits.softmax(dim=-1).topk(ids.shape[1], dim=-1)
    ids.copy_(at)
    weights.copy_(chosen / chosen.sum(dim=-1, keepdim=True) if renormalize else chosen)


def use_modular_kernel() -> None:
    """Let every MoE layer that this process makes have such a kernel."""
    global _library
    _library = torch.library.Library("_moe_C", "FRAGMENT")  # lives as long as it is kept
    _library.define(_SCHEMA)
    _library.impl("topk_softmax", topk_softmax, "CPU")
    backend = unquantized.UnquantizedMoeBackend.TRITON, TorchExperts
    unquantized.select_unquantized_moe_backend = lambda moe_config: backend
    init_workspace_manager(torch.device("cpu"), 1)
