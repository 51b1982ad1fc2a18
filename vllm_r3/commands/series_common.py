"""What the verbs of `vllm-r3 series` share."""

from __future__ import annotations

import argparse
import sys


def add_target(verb: argparse.ArgumentParser) -> None:
    """Add --target."""
    verb.add_argument(
        "--target",
        choices=("cpu", "cuda"),
        default="cpu",
        help="whose pinned wheel to read (default: cpu, the smaller one; $VLLM_R3_WHEEL overrides)",
    )


def say(text: str) -> None:
    """Talk goes to stderr."""
    print(text, file=sys.stderr)
