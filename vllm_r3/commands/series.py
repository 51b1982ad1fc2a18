"""`vllm-r3 series`: keep the patch series, and apply it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from vllm_r3.errors import R3Error


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
    target = argparse.ArgumentParser(add_help=False, parents=[common])
    target.add_argument(
        "--target",
        choices=("cpu", "cuda"),
        default="cpu",
        help="whose pinned wheel to read (default: cpu, the smaller one; $VLLM_R3_WHEEL overrides)",
    )
    site = argparse.ArgumentParser(add_help=False, parents=[common])
    where = site.add_mutually_exclusive_group()
    where.add_argument(
        "--site-packages",
        type=Path,
        metavar="DIR",
        help="where vllm/ lies (default: where this interpreter finds it)",
    )
    where.add_argument("--venv", type=Path, metavar="DIR", help="a virtual environment")

    def add(name, func, parent, text):
        verb = verbs.add_parser(name, parents=[parent], help=text)
        verb.set_defaults(func=func)
        return verb.add_argument

    arg = add("import", run_import, target, "make a git tree, one commit a patch")
    arg("tree", type=Path, metavar="DIR", help="a new or empty folder")
    add("fetch", run_fetch, target, "get the pinned wheel, print its path")
    arg = add("export", run_export, target, "write the series from a git tree")
    arg("tree", type=Path, metavar="DIR", nargs="?", help="the tree of import")
    arg("--base", default="r3-base", help="the base commit (default: r3-base)")
    arg(
        "--check",
        action="store_true",
        help="compare and list every file that differs, write nothing (exit 1 if any)",
    )
    arg(
        "--upstream",
        type=Path,
        metavar="DIR",
        help="in place of a tree: write the series to DIR as patches that git am takes on a vLLM "
        "checkout at the tag",
    )
    arg(
        "--sign-off",
        metavar="WHO",
        help="with --upstream: 'Name <address>' of the sender (default: a placeholder)",
    )
    add("apply", run_apply, site, "patch an installed vLLM in place, all or nothing")
    add("revert", run_revert, site, "take the patches out of an installed vLLM")
    arg = add("status", run_status, site, "tell stock, patched or modified (exit 1 if modified)")
    arg(
        "--expect",
        nargs=3,
        metavar=("PIN", "SERIES", "VERSION"),
        help="exit 1 too if it is not patched as these labels of an image say",
    )
    arg = add("verify", run_verify, target, "check everything, list every problem (exit 1 if any)")
    arg(
        "--python",
        type=Path,
        help="import every prefix with this interpreter, which must have vLLM's dependencies "
        "(default: .build/venv, if it is built)",
    )
    arg = add(
        "rebase",
        run_rebase,
        target,
        "try the series on another vLLM; report each patch (exit 1 on a conflict)",
    )
    arg("--onto", type=Path, required=True, metavar="WHEEL", help="a vLLM wheel")
    arg(
        "--tree",
        type=Path,
        metavar="DIR",
        help="also make a git tree there with both bases, in which to rebase for real",
    )


def run_fetch(args: argparse.Namespace) -> int:
    """Download the pinned wheel if it is not here; print its path."""
    from vllm_r3.series.folder import read_series
    from vllm_r3.series.pinned_wheel import pinned_wheel

    print(pinned_wheel(read_series(args.patches).pin, args.target))
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Make the git tree; print its path."""
    from vllm_r3.series.tree import import_series

    series, sources = _series_and_sources(args)
    import_series(series, sources, args.tree)
    say(f"{len(series.order)} patches on vLLM {series.pin.vllm}; the base is tagged r3-base")
    print(args.tree)
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write or compare the series folder; list what changed. Or write it for upstream."""
    from vllm_r3.series.folder import default_folder
    from vllm_r3.series.tree import plan_export, write_export

    if bool(args.tree) == bool(args.upstream):
        raise R3Error("export: expected the tree of import or --upstream DIR, one of them")
    if args.upstream:
        return _export_upstream(args)
    folder = args.patches or default_folder()
    plan = plan_export(args.tree, folder, args.base)
    verb = "differs" if args.check else "wrote"
    for name in plan.changed:
        print(f"{verb:<9} {name}")
    for name in plan.removed:
        print(f"removed   {name}")
    changes = len(plan.changed) + len(plan.removed)
    if args.check:
        say(f"{changes} of {len(plan.files)} files differ from {folder}")
        return 1 if changes else 0
    write_export(plan, folder)
    say(f"{len(plan.files) - 2} patches in {folder}, {changes} files changed")
    return 0


def _export_upstream(args: argparse.Namespace) -> int:
    from vllm_r3.series.upstream import SENDER, export_upstream

    series, sources = _series_and_sources(args)
    sent = export_upstream(series, sources, args.upstream, args.sign_off or SENDER)
    for name, num_tests in sent.items():
        print(f"{name}: {num_tests or 'no'} test files")
    if not args.sign_off:
        say(f"placeholder sender: pass --sign-off, or replace '{SENDER}' in all of them")
    say(f"on vLLM {series.pin.vllm}: git am --keep-non-patch {args.upstream}/*.patch")
    return 0


def run_apply(args: argparse.Namespace) -> int:
    """Patch an installed vLLM."""
    from vllm_r3.series.folder import read_series
    from vllm_r3.series.installed import apply_series

    series = read_series(args.patches)
    version, num_files = apply_series(series, _site(args))
    what = f"{num_files} files changed" if num_files else "already applied"
    print(f"vLLM {version}, {len(series.order)} patches, series {series.hash[:12]}: {what}")
    return 0


def run_revert(args: argparse.Namespace) -> int:
    """Restore an installed vLLM."""
    from vllm_r3.series.installed import revert_series

    version, num_files = revert_series(_site(args))
    what = f"{num_files} files restored" if num_files else "no series was applied"
    print(f"vLLM {version}: {what}")
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Say what an installed vLLM is."""
    from vllm_r3.series.folder import read_series
    from vllm_r3.series.installed import read_status

    root, series = _site(args), read_series(args.patches)
    status = read_status(series, root)
    applied = status.applied
    if status.state == "interrupted":
        raise R3Error(
            f"{root}: a run was cut off; run 'series apply' or 'series revert' again, "
            "which heals it"
        )
    which = ""
    if applied:
        which = f" with series {applied.series[:12]} ({len(applied.patches)} patches)"
        which += "" if applied.series == series.hash else ", not this checkout's"
    print(f"{status.state}{which}, vLLM {status.version}")
    for path in status.files:
        print(f"  {path}")
    if args.expect:
        found = (applied.base, applied.series, applied.version) if applied else ("", "", "")
        for name, want, have in zip(("pin", "series", "version"), args.expect, found, strict=True):
            if not (want and f"{have}.".startswith(f"{want}.")):
                raise R3Error(
                    f"{root}: expected {name} {want or 'of a label'}, found {have or 'none'}; "
                    "build with ./build.sh image, which passes the labels"
                )
    return 1 if status.files else 0


def run_verify(args: argparse.Namespace) -> int:
    """Check the series; print every problem and how many."""
    from vllm_r3.series import verify
    from vllm_r3.series.folder import default_folder, read_pin, read_series
    from vllm_r3.series.patch import blobs
    from vllm_r3.series.pinned_wheel import cache_folder, pinned_wheel, python_files

    folder = args.patches or default_folder()
    pin = read_pin(folder)
    wheel = pinned_wheel(pin, args.target)
    findings, patches = verify.verify_folder(folder, pin)
    unfit = list(verify.verify_sources(patches, python_files(wheel)))
    note = ""
    if not unfit and not findings:
        python = (args.python or cache_folder().parent / "venv" / "bin" / "python").absolute()
        scratch = cache_folder().parent / "scratch"
        note = f"  imported    {len(patches)} prefixes, and vLLM without a patch"
        if verify.can_import(python):
            series = read_series(folder)
            unfit += verify.import_prefixes(series, args.target, wheel, python, scratch)
        elif args.python:
            raise R3Error(f"--python {args.python}: expected an interpreter with torch, found none")
        else:
            note = (
                "  not run     import of every prefix: needs an interpreter with vLLM's "
                "dependencies; run ./build.sh venv, or pass --python"
            )
    findings += unfit
    print(f"verify: {len(patches)} patches, {len(blobs(patches))} files, base {pin}")
    for line in [*findings, *[note][: bool(note)]]:
        print(line)
    print(f"{len(findings)} problem{'' if len(findings) == 1 else 's'}")
    return 1 if findings else 0


def run_rebase(args: argparse.Namespace) -> int:
    """Report how each patch fits another vLLM."""
    from vllm_r3.series.pinned_wheel import python_files
    from vllm_r3.series.tree import import_series
    from vllm_r3.series.upstream import try_rebase

    series, sources = _series_and_sources(args)
    with tempfile.TemporaryDirectory() as temp:
        tree = args.tree or Path(temp) / "tree"
        git = import_series(series, sources, tree, python_files(args.onto))
        verdicts = try_rebase(git, series)
    print(f"rebase: {len(verdicts)} patches from {series.pin.vllm} onto {args.onto.name}")
    kinds = [verdict.partition(":")[0] for _, verdict in verdicts]
    for kind, (name, verdict) in zip(kinds, verdicts, strict=True):
        print(f"  {kind:<11} {name}{verdict.removeprefix(kind)}")
    if args.tree:
        say(f"now, in {args.tree}: git rebase --onto r3-onto r3-base main")
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("clean", "merged", "conflict")))
    return 1 if "conflict" in kinds else 0


def say(text: str) -> None:
    """Talk goes to stderr."""
    print(text, file=sys.stderr)


def _series_and_sources(args: argparse.Namespace):
    from vllm_r3.series.folder import read_series
    from vllm_r3.series.pinned_wheel import pinned_wheel, python_files

    series = read_series(args.patches)
    return series, python_files(pinned_wheel(series.pin, args.target))


def _site(args: argparse.Namespace) -> Path:
    from vllm_r3.series.installed import own_site, venv_site

    return venv_site(args.venv) if args.venv else args.site_packages or own_site()
