"""The verbs of `vllm-r3 series` that turn the series into a git tree and back."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_r3.commands.series_common import add_target, say
from vllm_r3.commands.series_upstream import add_upstream, run_upstream


def add_tree_verbs(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    """Add import, fetch and export."""
    verb = verbs.add_parser("import", parents=[common], help="make a git tree, one commit a patch")
    verb.add_argument("tree", type=Path, metavar="DIR", help="a new or empty folder")
    add_target(verb)
    verb.set_defaults(func=run_import)
    verb = verbs.add_parser("fetch", parents=[common], help="get the pinned wheel, print its path")
    add_target(verb)
    verb.set_defaults(func=run_fetch)
    verb = verbs.add_parser("export", parents=[common], help="write the series from a git tree")
    source = verb.add_mutually_exclusive_group(required=True)
    source.add_argument("tree", type=Path, metavar="DIR", nargs="?", help="the tree of import")
    add_upstream(verb, source)
    verb.add_argument("--base", default="r3-base", help="the base commit (default: r3-base)")
    verb.add_argument(
        "--check",
        action="store_true",
        help="compare and list every file that differs, write nothing (exit 1 if any)",
    )
    verb.set_defaults(func=run_export)


def run_fetch(args: argparse.Namespace) -> int:
    """Download the pinned wheel if it is not here; print its path."""
    from vllm_r3.series.folder import read_series
    from vllm_r3.series.source import pinned_wheel

    print(pinned_wheel(read_series(args.patches).pin, args.target))
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Make the git tree; print its path."""
    from vllm_r3.series.folder import read_series
    from vllm_r3.series.importing import import_series
    from vllm_r3.series.source import pinned_wheel, python_files

    series = read_series(args.patches)
    wheel = pinned_wheel(series.pin, args.target)
    count = import_series(series, python_files(wheel), args.tree)
    say(f"{count} patches on vLLM {series.pin.vllm}; the base is tagged r3-base")
    print(args.tree)
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write or compare the series folder; list what changed. Or write it for upstream."""
    if args.upstream:
        return run_upstream(args)
    from vllm_r3.series.export import plan_export, write_export
    from vllm_r3.series.folder import default_folder

    folder = args.patches or default_folder()
    plan = plan_export(args.tree, folder, args.base)
    for verb, names in (
        ("differs" if args.check else "wrote", plan.changed),
        ("removed", plan.removed),
    ):
        for name in names:
            print(f"{verb:<9} {name}")
    changes = len(plan.changed) + len(plan.removed)
    if args.check:
        say(f"{changes} of {len(plan.files)} files differ from {folder}")
        return 1 if changes else 0
    write_export(plan, folder)
    say(f"{len(plan.files) - 2} patches in {folder}, {changes} files changed")
    return 0
