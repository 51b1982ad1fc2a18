"""The arguments that describe a model, named as Megatron names them; shared by the checks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_r3.client import RouteShape


def add_shape(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add --num-layers, --moe-router-topk, --num-experts and --moe-layers."""
    parser.add_argument(
        "--num-layers", type=int, required=required, help="decoder layers, dense ones too"
    )
    parser.add_argument("--moe-router-topk", type=int, required=required, help="experts per token")
    parser.add_argument("--num-experts", type=int, help="logical experts (default: not checked)")
    parser.add_argument(
        "--moe-layers",
        type=layer_numbers,
        metavar="LIST",
        help="layers that route, from 0, as 3-47 or 1,3,5-9 (default: all)",
    )


def shape_of(args: argparse.Namespace) -> RouteShape:
    """Make the shape that the arguments describe."""
    from vllm_r3.client import RouteShape

    return RouteShape(args.num_layers, args.moe_router_topk, args.num_experts, args.moe_layers)


def layer_numbers(text: str) -> tuple[int, ...]:
    """Read `1,3,5-9`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            numbers += range(int(first), int(last or first) + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected layers as 1,3,5-9, got {text!r}") from None
    return tuple(numbers)
