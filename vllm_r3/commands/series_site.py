"""The verbs of `vllm-r3 series` that work on an installed vLLM."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_r3.commands.series_common import say
from vllm_r3.errors import R3Error


def add_site_verbs(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    """Add apply, revert and status."""
    for name, func, text in (
        ("apply", run_apply, "patch an installed vLLM in place, all or nothing"),
        ("revert", run_revert, "take the patches out of an installed vLLM"),
        ("status", run_status, "tell stock, patched or modified (exit 1 if modified)"),
    ):
        verb = verbs.add_parser(name, parents=[common], help=text)
        where = verb.add_mutually_exclusive_group(required=True)
        where.add_argument("--site-packages", type=Path, metavar="DIR", help="where vllm/ lies")
        where.add_argument("--venv", type=Path, metavar="DIR", help="a virtual environment")
        verb.set_defaults(func=func)


def run_apply(args: argparse.Namespace) -> int:
    """Patch an installed vLLM."""
    from vllm_r3.series.apply import apply_series
    from vllm_r3.series.folder import read_series

    series = read_series(args.patches)
    outcome = apply_series(series, _site(args))
    if outcome.recovered:
        say("an interrupted run was undone first")
    what = f"{outcome.num_files} files changed" if outcome.num_files else "it was so already"
    print(f"vLLM {outcome.version}, {len(series.order)} patches, series {series.hash[:12]}: {what}")
    return 0


def run_revert(args: argparse.Namespace) -> int:
    """Restore an installed vLLM."""
    from vllm_r3.series.apply import revert_series

    outcome = revert_series(_site(args))
    if outcome.recovered:
        say("an interrupted run was undone first")
    what = f"{outcome.num_files} files restored" if outcome.num_files else "no series was applied"
    print(f"vLLM {outcome.version}: {what}")
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Say what an installed vLLM is."""
    from vllm_r3.series.folder import read_series
    from vllm_r3.series.status import read_status

    root = _site(args)
    status = read_status(read_series(args.patches), root)
    if status.state == "interrupted":
        raise R3Error(
            f"{root}: a run was cut off; run 'series apply' or 'series revert' to heal it"
        )
    which = ""
    if status.series:
        which = f" with series {status.series[:12]} ({status.num_patches} patches)"
        which += "" if status.current else ", not this checkout's"
    print(f"{status.state}{which}, vLLM {status.version}")
    for path in status.files:
        print(f"  {path}")
    return 1 if status.files else 0


def _site(args: argparse.Namespace) -> Path:
    from vllm_r3.series.site import venv_site

    return venv_site(args.venv) if args.venv else args.site_packages
