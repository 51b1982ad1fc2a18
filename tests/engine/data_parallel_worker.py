"""What the stock CPU build lacks for data-parallel mixture-of-experts models.

Its communicator has no gather and no reduce-scatter of parts that differ in size, which dispatch
and combine call, and gathers no integers through shared memory; its MoE kernel takes every expert
for one of its own. Routing, dispatch, capture and all else is vLLM's. What is dispatched is noted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.v1.worker.cpu_worker import CPUWorker

_notes: Path | None = None
_noted: set[str] = set()


def note(what: str, **seen: Any) -> None:
    """Add a line of JSON to the file that all ranks append to, if it is new to this rank."""
    if _notes is None:
        return
    line = json.dumps({"what": what, "rank": distributed.get_rank()} | seen) + "\n"
    if line not in _noted:
        _noted.add(line)
        with _notes.open("a") as notes:
            notes.write(line)


class Communicator(CpuCommunicator):
    """CpuCommunicator with the collectives of AgRsAll2AllManager, over gloo."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.supports_tensor_dict:
            # all ranks have it mapped by now; the stock build leaves these 4 MiB behind for ever
            name = f"{self.dist_module.group_name}_{self.rank}"
            Path("/dev/shm", name).unlink(missing_ok=True)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Gather equal parts; the shared-memory kernel knows floats only."""
        if input_.is_floating_point():
            return super().all_gather(input_, dim)
        return DeviceCommunicatorBase.all_gather(self, input_, dim)

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Join the ranks' tensors along the first dimension, `sizes[i]` rows of rank i."""
        assert dim == 0
        if isinstance(input_, list):
            return [self._gather(tensor, sizes) for tensor in input_]
        return self._gather(input_, sizes)

    def _gather(self, own: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        sizes = [len(own)] * self.world_size if sizes is None else sizes
        assert sizes[self.rank_in_group] == len(own)
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sum over the ranks; this rank's rows of the sum."""
        assert dim == 0
        total = input_.clone()
        distributed.all_reduce(total, group=self.device_group)
        parts = total.chunk(self.world_size) if sizes is None else total.split(sizes)
        return parts[self.rank_in_group].contiguous()

    def dispatch_router_logits(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatch what has yet to be routed."""
        note("dispatched logits", sizes=_sizes())
        return super().dispatch_router_logits(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatch what each rank has routed."""
        note("dispatched ids", sizes=_sizes())
        return super().dispatch(*args, **kwargs)


def _sizes() -> list[int]:
    """Tokens of each rank that takes part."""
    metadata = get_forward_context().dp_metadata
    assert metadata is not None
    return metadata.get_chunk_sizes_across_dp_rank()


class LocalExperts(cpu_fused_moe.CPUFusedMOE):
    """The CPU kernel, which leaves out the experts of other ranks."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__(layer)
        self._all_local = self.forward_method
        self.forward_method = self._forward_local

    def _forward_local(
        self,
        layer: Any,
        input: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
    ) -> torch.Tensor:
        """Turn global ids into local ones; choices of other ranks' experts weigh nothing."""
        if layer.expert_map is not None:
            local = layer.expert_map[topk_ids.long()].long()
            is_mine = local >= 0
            topk_weights = topk_weights.masked_fill(~is_mine, 0.0)
            topk_ids = _fill_in(local, is_mine, len(layer.w13_weight)).to(topk_ids.dtype)
        return self._all_local(layer, input, topk_weights, topk_ids, *args)


def _fill_in(local: torch.Tensor, is_mine: torch.Tensor, num_local: int) -> torch.Tensor:
    """Name an expert that the token did not choose where the chosen one is another rank's.

    Without AVX-512 the CPU kernel counts a token once for an expert that it names twice.
    """
    assert num_local >= local.shape[1]
    chosen = torch.zeros(len(local), num_local, dtype=torch.int64)
    chosen.scatter_add_(1, local.clamp(min=0), is_mine.long())
    unused_first = chosen.argsort(dim=1, stable=True)
    nth = ((~is_mine).cumsum(dim=1) - 1).clamp(min=0)
    return torch.where(is_mine, local, unused_first.gather(1, nth))


class DataParallelCPUWorker(CPUWorker):
    """CPUWorker whose MoE layers can be spread over ranks."""

    def init_device(self) -> None:
        """Put the kernel of this engine in place, then start as usual."""
        global _notes
        options = self.vllm_config.additional_config
        _notes = Path(options["notes"]) if "notes" in options else None
        cpu_fused_moe.CPUFusedMOE = LocalExperts
        if options.get("modular"):
            from data_parallel_modular import use_modular_kernel

            use_modular_kernel()
        super().init_device()

    def execute_dummy_batch(self) -> None:
        """Run with the other ranks, without a request."""
        note("dummy batch")
        super().execute_dummy_batch()
