"""`vllm-r3 verify`: find out whether a rollout file or a running server can be trusted."""

from __future__ import annotations

import argparse

from vllm_r3.commands.shape_arguments import add_shape, shape_of


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `verify` with its verbs."""
    parser = subparsers.add_parser("verify", help="check a rollout file or a running server")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_rollout(verbs)
    _add_server(verbs)


def _add_rollout(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser(
        "rollout", help="judge every sample of a slime or vime debug file (.pt)"
    )
    parser.add_argument(
        "file", help="as written by --save-debug-rollout-data; loaded without running it"
    )
    add_shape(parser, required=True)
    parser.add_argument(
        "--min-samples-with-routing",
        type=int,
        metavar="N",
        help="samples that must hold rows (default: every one that was not aborted)",
    )
    parser.add_argument("--all", action="store_true", help="print the good verdicts too")
    parser.set_defaults(func=run_rollout)


def _add_server(verbs: argparse._SubParsersAction) -> None:
    parser = verbs.add_parser("server", help="ask a server on every endpoint and check its rows")
    parser.add_argument("url", help="its address, as http://127.0.0.1:8000")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=300,
        help="prompt length (default: 300); the warm check needs more than one KV block",
    )
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens to generate (default: 8)")
    parser.add_argument(
        "--max-differing",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of (row, layer) cells that may differ between two answers "
        "(default: 0, right for float32; low precision may flip near ties)",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds a request (default: 600)"
    )
    parser.set_defaults(func=run_server)


def run_rollout(args: argparse.Namespace) -> int:
    """Print the verdicts; 0 when the file passes."""
    from vllm_r3.checks.rollout import OK, verify_rollout

    report = verify_rollout(args.file, shape_of(args), args.min_samples_with_routing)
    if args.all:
        for verdict in report.verdicts:
            if verdict.kind == OK:
                print(f"{verdict.sample}: {OK}")
    print("\n".join(report.lines()))
    return 0 if report.passed else 1


def run_server(args: argparse.Namespace) -> int:
    """Print every check's outcome; 0 when all passed."""
    from vllm_r3.checks.server import verify_server

    report = verify_server(
        args.url,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        max_differing=args.max_differing,
        timeout=args.timeout,
    )
    print("\n".join(report.lines()))
    return 0 if report.passed else 1
