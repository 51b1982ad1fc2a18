"""`vllm-r3 replay`: prove a server's rows by replaying them in Hugging Face transformers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `replay`."""
    parser = subparsers.add_parser(
        "replay", help="replay a server's rows in transformers and measure"
    )
    parser.add_argument("model", help="the model that the server serves, a directory or a name")
    parser.add_argument("--server", required=True, metavar="URL", help="the server")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the transformers model (default: auto, the checkpoint's; use the server's)",
    )
    parser.add_argument("--texts", type=int, default=8, help="texts to sample (default: 8)")
    parser.add_argument("--prompt-tokens", type=int, default=48, help="prompt length (default: 48)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens to sample (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw them by position (plot extra)"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print both mismatches; 0 when replaying does not raise it."""
    from vllm_r3.replay.replay import plot, replay

    report = replay(
        args.model,
        args.server,
        dtype=args.dtype,
        texts=args.texts,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    print("\n".join(report.lines()))
    if args.json:
        args.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    if args.png:
        plot(report, args.png)
        print(f"plot: {args.png}", file=sys.stderr)
    return 0 if report.passed else 1
