"""`vllm-r3 compare`: ask two servers the same and put their rows side by side."""

from __future__ import annotations

import argparse

from vllm_r3.commands.shape_arguments import add_shape, shape_of


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `compare`."""
    parser = subparsers.add_parser(
        "compare", help="compare the rows of two servers, vLLM or SGLang"
    )
    parser.add_argument("url_a", help="one server")
    parser.add_argument("url_b", help="the other, with the same model")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="prompt length (default: 64)")
    parser.add_argument(
        "--max-tokens", type=int, default=32, help="tokens to generate (default: 32)"
    )
    parser.add_argument(
        "--min-agreement",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of rows that must agree in every layer (default: 1; exit 1 below)",
    )
    add_shape(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; 0 when the servers agree."""
    from vllm_r3.checks.compare import compare_servers

    comparison = compare_servers(
        args.url_a,
        args.url_b,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        shape=shape_of(args),
    )
    print("\n".join(comparison.lines()))
    return 0 if comparison.passed(args.min_agreement) else 1
