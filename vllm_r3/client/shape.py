"""What every row must obey, once for encoder, decoder and checks.

A row is [L, K]: the expert ids of one token, one line per decoder layer. This module holds the
dtype rule, the description of a model's routing (`RouteShape`), the reader of JSON fields, where
anything may stand anywhere, and the error type. It imports numpy only.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_r3.errors import R3Error

UINT8_MAX_EXPERTS = 256
MAX_EXPERTS = np.iinfo(np.int16).max + 1

INTEGER, INTEGERS = "an integer of 0 or more", "a list of integers"
STRING, OBJECT, OBJECTS = "a string", "an object", "a list of objects"
_FITS: dict[str, Callable[[Any], bool]] = {
    INTEGER: lambda value: type(value) is int and value >= 0,
    INTEGERS: lambda value: isinstance(value, list) and set(map(type, value)) <= {int},
    STRING: lambda value: isinstance(value, str),
    OBJECT: lambda value: isinstance(value, Mapping),
    OBJECTS: lambda value: isinstance(value, list) and all(isinstance(v, Mapping) for v in value),
}


class RoutesError(R3Error):
    """Rows that are missing, misshapen or impossible; says where, what was expected and found."""


def take(holder: Mapping[str, Any], name: str, kind: str, where: str) -> Any:
    """Return a field of parsed JSON, None where it is missing or null.

    Raises:
        RoutesError: the value is of another kind.
    """
    value = holder.get(name)
    if value is not None and not _FITS[kind](value):
        raise RoutesError(f"{where}: expected {name} to be {kind}, got {reprlib.repr(value)}")
    return value


def dtype_for(num_experts: int) -> np.dtype:
    """Return the dtype that ids of `num_experts` experts travel in: uint8, above 256 int16."""
    if not 0 < num_experts <= MAX_EXPERTS:
        raise RoutesError(f"num_experts must be in [1, {MAX_EXPERTS}], got {num_experts}")
    return np.dtype(np.uint8 if num_experts <= UINT8_MAX_EXPERTS else np.int16)


def check_ids(rows: np.ndarray, num_experts: int | None, where: str) -> None:
    """Refuse ids outside [0, E), or what no int16 can hold where E is unknown."""
    limit = MAX_EXPERTS if num_experts is None else num_experts
    if rows.dtype == np.uint8 and limit >= UINT8_MAX_EXPERTS or not rows.size:
        return
    if int(rows.max()) < limit and int(rows.min()) >= 0:
        return
    row, layer, place = (int(n) for n in np.argwhere((rows < 0) | (rows >= limit))[0])
    raise RoutesError(
        f"{where}: expected expert ids in [0, {limit}), got {int(rows[row, layer, place])} "
        f"at row {row}, layer {layer}"
    )


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
            if value is not None and not 0 < value <= MAX_EXPERTS:
                raise RoutesError(f"{name} must be in [1, {MAX_EXPERTS}], got {value}")
        if self.moe_layers is None:
            return
        object.__setattr__(self, "moe_layers", tuple(int(layer) for layer in self.moe_layers))
        limit = self.num_layers
        if limit is not None and any(not 0 <= layer < limit for layer in self.moe_layers):
            raise RoutesError(f"moe_layers must lie in [0, {limit}), got {list(self.moe_layers)}")

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> RouteShape:
        """Read `routed_experts_meta` of an answer, or the body of `/routed_experts/info`."""
        names = ("num_layers", "top_k", "num_experts")
        counts = [take(meta, name, INTEGER, "routed_experts_meta") for name in names]
        moe_layers = take(meta, "moe_layers", INTEGERS, "routed_experts_meta")
        return cls(*counts, None if moe_layers is None else tuple(moe_layers))

    @classmethod
    def from_args(cls, args: Any) -> RouteShape:
        """Read a trainer's arguments, as Megatron, slime and vime name them."""
        names = ("num_layers", "moe_router_topk", "num_experts", "moe_layer_freq")
        num_layers, top_k, num_experts, freq = (getattr(args, name, None) for name in names)
        known = freq is not None and num_layers is not None
        moe_layers = moe_layers_of(num_layers, freq) if known else None
        return cls(num_layers, top_k, num_experts, moe_layers)

    def joined(self, other: RouteShape, where: str) -> RouteShape:
        """Fill this shape's unknowns from `other`; raise RoutesError where they disagree."""
        known: dict[str, Any] = {}
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            if mine is not None and theirs is not None and mine != theirs:
                raise RoutesError(f"{where}: expected {name} {mine}, got {theirs}")
            known[name] = theirs if mine is None else mine
        return RouteShape(**known)


UNKNOWN = RouteShape()


def moe_layers_of(num_layers: int, freq: int | list[int]) -> tuple[int, ...]:
    """Turn Megatron's `moe_layer_freq` into global layer numbers.

    An integer N: every layer divisible by N routes; a list holds 1 for each layer that does.
    """
    if isinstance(freq, int):
        return tuple(range(0, num_layers, freq))
    if len(freq) != num_layers:
        raise RoutesError(
            f"moe_layer_freq must have one entry for each of {num_layers} layers, got {len(freq)}"
        )
    return tuple(layer for layer, routes in enumerate(freq) if routes)
