"""`vllm-r3 inspect`: show how evenly the experts of each layer are used."""

from __future__ import annotations

import argparse
import sys

from vllm_r3.commands.shape_arguments import add_shape, shape_of


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `inspect`."""
    parser = subparsers.add_parser("inspect", help="show expert load and entropy of each layer")
    parser.add_argument(
        "source", help="a rollout (.pt), rows (.npy), an answer (.json) or an address http://..."
    )
    parser.add_argument("--png", metavar="FILE", help="draw a heat map too (needs the plot extra)")
    add_shape(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from vllm_r3.checks.inspect import expert_load, heat_map, read_rows

    rows, shape = read_rows(args.source, shape_of(args))
    load = expert_load(rows, shape)
    print("\n".join(load.lines()))
    if args.png:
        heat_map(load, args.png)
        print(f"heat map: {args.png}", file=sys.stderr)
    return 0
