"""`vllm-r3 series`: keep the patch series, and apply it; `vllm-r3 wheel`: the patched wheel."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

from vllm_r3.errors import R3Error

VLLM = "which series: the one on this vLLM (default: the vLLM to patch, else 0.21.0)"
FOLDER = "a series folder (default: that of --vllm in this checkout or installation)"
TARGET = "whose pinned wheel to read (default: cpu, the smaller one; $VLLM_R3_WHEEL overrides)"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `series` with its verbs, and `wheel`."""
    parser = subparsers.add_parser("series", help="keep, apply and check the patch series")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name, func, text, options, verbs=verbs):
        parser = verbs.add_parser(name, help=text)
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--vllm", metavar="VERSION", help=VLLM)
        which.add_argument("--patches", type=Path, metavar="FOLDER", help=FOLDER)
        parser.set_defaults(func=func)
        options(parser)
        return parser.add_argument

    def target(parser):
        parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help=TARGET)

    def site(parser):
        where = parser.add_mutually_exclusive_group()
        text = "where vllm/ lies (default: where this interpreter finds it)"
        where.add_argument("--site-packages", type=Path, metavar="DIR", help=text)
        where.add_argument("--venv", type=Path, metavar="DIR", help="a virtual environment")

    add = verb("import", _import, "make a git tree, one commit a patch", target)
    add("tree", type=Path, metavar="DIR", help="a new or empty folder")
    verb("fetch", _fetch, "get the pinned wheel, print its path", target)
    add = verb("export", _export, "write the series from a git tree", target)
    add("tree", type=Path, metavar="DIR", nargs="?", help="the tree of import")
    add("--base", default="r3-base", help="the base commit (default: r3-base)")
    text = "compare and list every file that differs, write nothing (exit 1 if any)"
    add("--check", action="store_true", help=text)
    text = "in place of a tree: write patches to DIR that git am takes on a vLLM checkout"
    add("--upstream", type=Path, metavar="DIR", help=text)
    text = "with --upstream: 'Name <address>' of the sender (default: a placeholder)"
    add("--sign-off", metavar="WHO", help=text)
    verb("apply", _apply, "patch an installed vLLM in place", site)
    verb("revert", _revert, "take the patches out of an installed vLLM", site)
    add = verb("status", _status, "tell stock, patched or modified (exit 1 if modified)", site)
    text = "exit 1 too if it is not patched as these labels of an image say"
    add("--expect", nargs=3, metavar=("PIN", "SERIES", "VERSION"), help=text)
    text = "check everything, list every problem (exit 1 if any)"
    add = verb("verify", _verify, text, target)
    text = "import every prefix with this one, which has vLLM's needs (default: build.sh's)"
    add("--python", type=Path, help=text)
    text = "try the series on another vLLM; report each patch (exit 1 on a conflict)"
    add = verb("rebase", _rebase, text, target)
    add("--onto", type=Path, required=True, metavar="WHEEL", help="a vLLM wheel")
    text = "leave a git tree there with both bases, in which to rebase for real"
    add("--tree", type=Path, metavar="DIR", help=text)
    text = "repack the pinned wheel with the series applied"
    add = verb("wheel", _wheel, text, target, subparsers)
    text = "put the new wheel here (default: dist); the pinned one is never touched"
    add("--dest", type=Path, default=Path("dist"), metavar="DIR", help=text)
    text = "write name, version, size, sha256 and series as JSON"
    add("--report", type=Path, metavar="FILE", help=text)


def _fetch(args: argparse.Namespace) -> int:
    from vllm_r3.series import folder, pinned_wheel

    print(pinned_wheel.pinned_wheel(folder.read_pin(_folder(args)), args.target))
    return 0


def _import(args: argparse.Namespace) -> int:
    from vllm_r3.series.tree import import_series

    series, sources = _series_and_sources(args)
    import_series(series, sources, args.tree)
    _say(f"{len(series.order)} patches on vLLM {series.pin.vllm}; the base is tagged r3-base")
    print(args.tree)
    return 0


def _export(args: argparse.Namespace) -> int:
    from vllm_r3.series.tree import export_series

    if bool(args.tree) == bool(args.upstream):
        raise R3Error("export: expected the tree of import or --upstream DIR, one of them")
    if args.upstream:
        return _export_upstream(args)
    folder = _folder(args)
    changed, removed = export_series(args.tree, folder, args.base, write=not args.check)
    for name in changed:
        print(f"{'differs' if args.check else 'wrote':<9} {name}")
    for name in removed:
        print(f"removed   {name}")
    _say(f"{len(changed) + len(removed)} files of {folder} {'differ' if args.check else 'changed'}")
    return 1 if args.check and changed + removed else 0


def _export_upstream(args: argparse.Namespace) -> int:
    from vllm_r3.series.upstream import SENDER, export_upstream

    series, sources = _series_and_sources(args)
    sent = export_upstream(series, sources, args.upstream, args.sign_off or SENDER)
    for name, num_tests in sent.items():
        print(f"{name}: {num_tests or 'no'} test files")
    if not args.sign_off:
        _say(f"placeholder sender: pass --sign-off, or replace '{SENDER}' in all of them")
    _say(f"on vLLM {series.pin.vllm}: git am --keep-non-patch {args.upstream}/*.patch")
    return 0


def _apply(args: argparse.Namespace) -> int:
    from vllm_r3.series import folder, installed

    series = folder.read_series(_folder(args))
    version, num_files = installed.apply_series(series, _site(args))
    what = f"{num_files} files changed" if num_files else "already applied"
    print(f"vLLM {version}, {len(series.order)} patches, series {series.hash[:12]}: {what}")
    return 0


def _revert(args: argparse.Namespace) -> int:
    from vllm_r3.series.installed import revert_series

    version, num_files = revert_series(_site(args))
    what = f"{num_files} files restored" if num_files else "no series was applied"
    print(f"vLLM {version}: {what}")
    return 0


def _status(args: argparse.Namespace) -> int:
    from vllm_r3.series import folder, installed

    root, series = _site(args), folder.read_series(_folder(args))
    state, site, modified = installed.read_status(series, root)
    applied = site.applied
    if state == "interrupted":
        raise R3Error(
            f"{root}: a run was cut off; run 'series apply' or 'series revert' again, "
            "which heals it"
        )
    which = (
        f" with series {applied.series[:12]} ({len(applied.patches)} patches)" if applied else ""
    )
    if applied and applied.series != series.hash:
        which += ", not this checkout's"
    print(f"{state}{which}, vLLM {site.version}")
    for path in modified:
        print(f"  {path}")
    if args.expect:
        found = (applied.base, applied.series, applied.version) if applied else ("none",) * 3
        for name, want, have in zip(("pin", "series", "version"), args.expect, found, strict=True):
            if not want or not f"{have}.".startswith(f"{want}."):  # 0.21.0+r3.1 of +r3.1.cu129
                raise R3Error(
                    f"{root}: expected {name} {want or 'of a label'}, found {have}; "
                    "build with ./build.sh image, which passes the labels of its --vllm"
                )
    return 1 if modified else 0


def _verify(args: argparse.Namespace) -> int:
    from vllm_r3.series import folder, patch, pinned_wheel, verify

    where = _folder(args)
    pin = folder.read_pin(where)
    wheel = pinned_wheel.pinned_wheel(pin, args.target)
    findings, patches = verify.verify_folder(where, pin)
    findings += verify.verify_sources(patches, pinned_wheel.python_files(wheel))
    build = pinned_wheel.build_folder(pin)
    python = (args.python or build / "venv" / "bin" / "python").absolute()
    note = "  not run     import of every prefix: "
    if findings:
        note += "fix the problems above first"
    elif not python.exists():
        note += f"{python} is not there; run ./build.sh venv, or pass --python"
    else:
        series = folder.read_series(where)
        findings += verify.import_prefixes(series, args.target, wheel, python, build / "scratch")
        note = f"  imported    {len(patches)} prefixes, and vLLM without a patch"
    print(f"verify: {len(patches)} patches, {len(patch.blobs(patches))} files, base {pin}")
    for line in [*findings, note]:
        print(line)
    print(f"{len(findings)} problem{'' if len(findings) == 1 else 's'}")
    return 1 if findings else 0


def _rebase(args: argparse.Namespace) -> int:
    from vllm_r3.series import pinned_wheel, tree, upstream

    series, sources = _series_and_sources(args)
    with tempfile.TemporaryDirectory() as temp:
        dest, onto = args.tree or Path(temp) / "tree", pinned_wheel.python_files(args.onto)
        verdicts = upstream.try_rebase(tree.import_series(series, sources, dest, onto), series)
    print(f"rebase: {len(verdicts)} patches from {series.pin.vllm} onto {args.onto.name}")
    for name, kind, files in verdicts:
        print(f"  {kind:<11} {name}" + (f": {', '.join(files)}" if files else ""))
    if args.tree:
        _say(f"now, in {args.tree}: git rebase --onto r3-onto r3-base main")
    kinds = [kind for _, kind, _ in verdicts]
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("clean", "merged", "conflict")))
    return 1 if "conflict" in kinds else 0


def _wheel(args: argparse.Namespace) -> int:
    from vllm_r3.series import folder, pinned_wheel
    from vllm_r3.series.wheel import repack

    series = folder.read_series(_folder(args))
    pinned = pinned_wheel.pinned_wheel(series.pin, args.target)
    path = repack(series, args.target, pinned, args.dest)
    _say(f"{len(series.order)} patches, series {series.hash[:12]}")
    if args.report:
        version = series.pin.patched_version(args.target)
        report = {"name": path.name, "version": version, "size": path.stat().st_size}
        report |= {"sha256": pinned_wheel.file_sha256(path), "series": series.hash}
        args.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(path)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # results go to stdout, talk does not


def _folder(args: argparse.Namespace) -> Path:
    from vllm_r3.series.folder import DEFAULT, series_folder
    from vllm_r3.series.installed import read_site

    if args.patches:
        return args.patches
    if args.vllm is None and "site_packages" in args:
        with contextlib.suppress(R3Error):  # no series on it: the default one's words are better
            return series_folder(read_site(_site(args)).version.partition("+")[0])
    return series_folder(args.vllm or DEFAULT)


def _series_and_sources(args: argparse.Namespace):
    from vllm_r3.series import folder, pinned_wheel

    series = folder.read_series(_folder(args))
    return series, pinned_wheel.python_files(pinned_wheel.pinned_wheel(series.pin, args.target))


def _site(args: argparse.Namespace) -> Path:
    from vllm_r3.series.installed import own_site, venv_site

    return venv_site(args.venv) if args.venv else args.site_packages or own_site()
