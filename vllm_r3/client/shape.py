"""What every row must obey, once for encoder, decoder and checks.

A row is [L, K]: the expert ids of one token, one line per decoder layer. This module holds the
dtype rule, the description of a model's routing (`RouteShape`) and the error type. It imports numpy
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from vllm_r3.client.fields import RoutesError, integer, integers

UINT8_MAX_EXPERTS = 256
MAX_EXPERTS = np.iinfo(np.int16).max + 1
MAX_SIDE = 1 << 20


def dtype_for(num_experts: int) -> np.dtype:
    """Return the dtype that ids of `num_experts` experts travel in: uint8, above 256 int16."""
    if not 0 < num_experts <= MAX_EXPERTS:
        raise RoutesError(f"num_experts must be in [1, {MAX_EXPERTS}], got {num_experts}")
    return np.dtype(np.uint8 if num_experts <= UINT8_MAX_EXPERTS else np.int16)


@dataclass(frozen=True)
class RouteShape:
    """What is known of a model's routing; None means unknown.

    Attributes:
        num_layers: decoder layers L, dense ones included.
        top_k: experts per token K.
        num_experts: logical experts E.
        moe_layers: global numbers (from 0) of the layers that route.
    """

    num_layers: int | None = None
    top_k: int | None = None
    num_experts: int | None = None
    moe_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "top_k", "num_experts"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_SIDE:
                raise RoutesError(f"{name} must be in [1, {MAX_SIDE}], got {value}")
        if self.moe_layers is not None:
            object.__setattr__(self, "moe_layers", tuple(int(layer) for layer in self.moe_layers))
            if self.num_layers is not None and any(
                not 0 <= n < self.num_layers for n in self.moe_layers
            ):
                raise RoutesError(
                    f"moe_layers must lie in [0, {self.num_layers}), got {list(self.moe_layers)}"
                )

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any] | None) -> RouteShape:
        """Read `routed_experts_meta` of an answer, or the body of `/routed_experts/info`."""
        meta = meta or {}
        moe_layers = integers(meta, "moe_layers", "routed_experts_meta")
        return cls(
            num_layers=integer(meta, "num_layers", "routed_experts_meta"),
            top_k=integer(meta, "top_k", "routed_experts_meta"),
            num_experts=integer(meta, "num_experts", "routed_experts_meta"),
            moe_layers=None if moe_layers is None else tuple(moe_layers),
        )

    @classmethod
    def from_args(cls, args: Any) -> RouteShape:
        """Read a trainer's arguments, as Megatron, slime and vime name them."""
        num_layers = getattr(args, "num_layers", None)
        freq = getattr(args, "moe_layer_freq", None)
        return cls(
            num_layers=num_layers,
            top_k=getattr(args, "moe_router_topk", None),
            num_experts=getattr(args, "num_experts", None),
            moe_layers=None
            if freq is None or num_layers is None
            else moe_layers_of(num_layers, freq),
        )

    def joined(self, other: RouteShape, where: str) -> RouteShape:
        """Fill this shape's unknowns from `other`; raise RoutesError where they disagree."""
        known: dict[str, Any] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine is not None and theirs is not None and mine != theirs:
                raise RoutesError(
                    f"{where}: expected {field.name} {_plain(mine)}, got {_plain(theirs)}"
                )
            known[field.name] = theirs if mine is None else mine
        return RouteShape(**known)


UNKNOWN = RouteShape()


def moe_layers_of(num_layers: int, freq: int | list[int]) -> tuple[int, ...]:
    """Turn Megatron's `moe_layer_freq` into global layer numbers.

    An integer N means that every layer divisible by N routes; a list holds 1 for each layer that
    does.
    """
    if isinstance(freq, int):
        return tuple(range(0, num_layers, freq))
    if len(freq) != num_layers:
        raise RoutesError(
            f"moe_layer_freq must have one entry for each of {num_layers} layers, got {len(freq)}"
        )
    return tuple(layer for layer, routes in enumerate(freq) if routes)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
