"""The verbs of `vllm-r3 series` that check it, and try it on another vLLM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_r3.commands.series_common import add_target, say
from vllm_r3.errors import R3Error

if TYPE_CHECKING:
    from vllm_r3.series.findings import Finding
    from vllm_r3.series.folder import Series
    from vllm_r3.series.patchfile import Patch
    from vllm_r3.series.pin import Pin


def add_check_verbs(verbs: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    """Add verify and rebase."""
    verb = verbs.add_parser(
        "verify", parents=[common], help="check everything, list every problem (exit 1 if any)"
    )
    add_target(verb)
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
    add_target(verb)
    verb.set_defaults(func=run_rebase)


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
    say(f"now, in {args.tree}: git rebase --onto r3-onto r3-base main")
