"""`vllm-r3 series`: keep the patch series, and apply it."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_r3.commands.series_check import add_check_verbs
from vllm_r3.commands.series_site import add_site_verbs
from vllm_r3.commands.series_tree import add_tree_verbs


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `series` with its verbs."""
    parser = subparsers.add_parser("series", help="keep, apply and check the patch series")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--patches",
        type=Path,
        metavar="FOLDER",
        help="the series folder (default: patches/v0.21.0 of this checkout or installation)",
    )
    add_tree_verbs(verbs, common)
    add_site_verbs(verbs, common)
    add_check_verbs(verbs, common)
