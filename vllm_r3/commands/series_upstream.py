"""`vllm-r3 series export --upstream DIR`: the series as patches to send to vLLM."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_r3.commands.series_common import say


def add_upstream(verb: argparse.ArgumentParser, source: argparse._MutuallyExclusiveGroup) -> None:
    """Add --upstream, which stands in for the tree, and --sign-off."""
    source.add_argument(
        "--upstream",
        type=Path,
        metavar="DIR",
        help="write the series to DIR as patches that git am takes on a vLLM checkout at the tag",
    )
    verb.add_argument(
        "--sign-off",
        metavar="WHO",
        help="with --upstream: 'Name <address>' of the sender (default: a placeholder)",
    )


def run_upstream(args: argparse.Namespace) -> int:
    """Write the patches; print one line each with the number of its tests."""
    from vllm_r3.series.folder import read_series
    from vllm_r3.series.upstream import SENDER, upstream_patches, write_upstream

    series = read_series(args.patches)
    sent = upstream_patches(series, args.sign_off or SENDER)
    write_upstream(sent, args.upstream)
    for patch in sent:
        print(f"{patch.name}: {len(patch.tests) or 'no'} test files")
    if not args.sign_off:
        say(f"placeholder sender: pass --sign-off, or replace '{SENDER}' in all of them")
    say(f"on vLLM {series.pin.vllm}: git am --keep-non-patch {args.upstream}/*.patch")
    return 0
