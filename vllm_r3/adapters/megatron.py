"""Rows into Megatron's RouterReplay, by global layer number.

`RouterReplay` keeps one instance a router in the order of construction, MTP routers included, and
its own `set_replay_data` hands tensors out in that order. Here each router is found in the model by
its global layer number instead, so that dense layers, pipeline offsets, virtual stages and MTP
heads cannot shift a row. Needs megatron-core 0.16 or newer and torch; both are imported when
called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_r3.client.shape import RoutesError, moe_layers_of
from vllm_r3.errors import R3Error

if TYPE_CHECKING:
    import torch

MTP_PREFIX = "MultiTokenPrediction"


@dataclass(frozen=True)
class Router:
    """A router of the target model: its module, its replay instance, its global layer from 0."""

    name: str
    layer: int
    module: Any
    replay: Any


def target_routers(model: Any) -> list[Router]:
    """Find the routers of a model, or of a list of virtual stages, in layer order, MTP left out.

    Raises:
        R3Error: the model was built without `moe_enable_routing_replay`, routes in a fused kernel
            (which ignores replay without a word), or has no router.
    """
    routers = []
    for stage, chunk in enumerate(model if isinstance(model, (list, tuple)) else [model]):
        for name, module in _modules_without_mtp(chunk):
            if hasattr(module, "router_replay") and hasattr(module, "layer_number"):
                routers.append(_checked(f"stage {stage}, {name}", module))
    if not routers:
        raise R3Error("expected a model with MoE routers, found none on this rank")
    return sorted(routers, key=lambda router: router.layer)


def layer_tensors(rows: np.ndarray, layers: Iterable[int]) -> list[torch.Tensor]:
    """Cut (T, L, K) rows into one contiguous int64 tensor (T, K) for each global layer number."""
    import torch

    tensors = []
    for layer in layers:
        if not 0 <= layer < rows.shape[1]:
            raise RoutesError(
                f"layer {layer}: expected rows of more than {layer} decoder layers, got "
                f"{rows.shape[1]}; rows over MoE layers only need moe_layers when they are decoded"
            )
        tensors.append(torch.from_numpy(np.ascontiguousarray(rows[:, layer], dtype=np.int64)))
    return tensors


def set_replay(model: Any, rows: np.ndarray) -> None:
    """Give each target router its rows and switch it to replay; MTP routers keep routing freely.

    `rows` are (T, L, K) for this rank's T tokens of the microbatch, as `batch.pack_rows` lays them.
    """
    routers = target_routers(model)
    tensors = layer_tensors(rows, [router.layer for router in routers])
    for router in routers:
        if rows.shape[2] != router.module.topk:
            raise RoutesError(
                f"{router.name}: expected top_k {router.module.topk}, got {rows.shape[2]} in the "
                "rows"
            )
    for router, tensor in zip(routers, tensors, strict=True):
        router.replay.set_target_indices(tensor)
    set_action(model, "replay_forward")


def set_action(model: Any, action: str | None) -> None:
    """Switch every target router to an action, or to its own routing.

    Actions: `record`, `replay_forward`, `replay_backward`, or None.
    With activation recomputation call it with `replay_backward` before the backward pass: the
    recomputed forwards then take the microbatches' rows in the order they were set.
    """
    try:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction
    except ImportError as error:
        raise R3Error(
            f"RouterReplay needs megatron-core 0.16 or newer ({error}): pip install "
            "'vllm-r3[megatron]'"
        ) from None
    for router in target_routers(model):
        if action is None:
            router.replay.clear_router_replay_action()
        else:
            router.replay.set_router_replay_action(RouterReplayAction(action))


def clear_replay(model: Any) -> None:
    """Drop rows and action of every target router."""
    for router in target_routers(model):
        router.replay.clear_indices()
        router.replay.clear_router_replay_action()


@contextmanager
def replaying(model: Any, rows: np.ndarray) -> Iterator[None]:
    """Replay `rows` within the block, then let the routers go."""
    set_replay(model, rows)
    try:
        yield
    finally:
        clear_replay(model)


def stage_moe_layers(
    config: Any, pp_rank: int, vp_stages: Sequence[int | None] = (None,)
) -> list[int]:
    """Return which global MoE layers, from 0, a pipeline rank holds, in the order it builds them.

    That is the order that `RouterReplay.set_replay_data` wants where no MTP router was built.
    `config` is Megatron's TransformerConfig; `vp_stages` are the rank's virtual stages in order.
    """
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    routed = set(moe_layers_of(config.num_layers, config.moe_layer_freq))
    layers = []
    for stage in vp_stages:
        offset = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=pp_rank)
        built = get_num_layers_to_build(config, vp_stage=stage, pp_rank=pp_rank)
        layers += [layer for layer in range(offset, offset + built) if layer in routed]
    return layers


def _modules_without_mtp(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if type(module).__name__.startswith(MTP_PREFIX):
        return
    yield prefix, module
    for name, child in module.named_children():
        yield from _modules_without_mtp(child, f"{prefix}.{name}" if prefix else name)


def _checked(name: str, module: Any) -> Router:
    if module.router_replay is None:
        raise R3Error(f"{name}: expected moe_enable_routing_replay true in the config, got false")
    if getattr(module.config, "moe_router_fusion", False):
        raise R3Error(
            f"{name}: expected moe_router_fusion false, got true: the fused kernel ignores replay"
        )
    if module.layer_number is None:
        raise R3Error(f"{name}: expected a layer_number, got none")
    return Router(name, module.layer_number - 1, module, module.router_replay)
