"""`vllm-r3 wheel`: repack the pinned wheel with the series applied."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `wheel`."""
    add = subparsers.add_parser("wheel", help="repack the pinned wheel with the series applied")
    add.set_defaults(func=run)
    text = "which wheel (default: cpu)"
    add.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help=text)
    text = "put the new wheel here (default: dist); the pinned one is never touched"
    add.add_argument("--dest", type=Path, default=Path("dist"), metavar="DIR", help=text)
    text = "write name, version, size, sha256 and series as JSON"
    add.add_argument("--report", type=Path, metavar="FILE", help=text)
    add.add_argument("--patches", type=Path, metavar="FOLDER", help="the series folder")


def run(args: argparse.Namespace) -> int:
    """Write the wheel; print its path alone."""
    from vllm_r3.series import folder, pinned_wheel
    from vllm_r3.series.wheel import repack

    series = folder.read_series(args.patches)
    pinned = pinned_wheel.pinned_wheel(series.pin, args.target)
    path = repack(series, args.target, pinned, args.dest)
    print(f"{len(series.order)} patches, series {series.hash[:12]}", file=sys.stderr)
    if args.report:
        version = series.pin.patched_version(args.target)
        report = {"name": path.name, "version": version, "size": path.stat().st_size}
        report |= {"sha256": pinned_wheel.file_sha256(path), "series": series.hash}
        args.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(path)
    return 0
