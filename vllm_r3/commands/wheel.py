"""`vllm-r3 wheel`: repack the pinned wheel with the series applied."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `wheel`."""
    parser = subparsers.add_parser("wheel", help="repack the pinned wheel with the series applied")
    parser.add_argument(
        "--target", choices=("cpu", "cuda"), default="cpu", help="which wheel (default: cpu)"
    )
    parser.add_argument(
        "--dest",
        type=Path,
        default=Path("dist"),
        metavar="DIR",
        help="put the new wheel here (default: dist); the pinned one is never touched",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write name, size, sha256 and series as JSON"
    )
    parser.add_argument("--patches", type=Path, metavar="FOLDER", help="the series folder")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the wheel; print its path alone."""
    from vllm_r3.series.folder import read_series
    from vllm_r3.series.pinned_wheel import file_sha256, pinned_wheel
    from vllm_r3.series.wheel import repack

    series = read_series(args.patches)
    path = repack(series, args.target, pinned_wheel(series.pin, args.target), args.dest)
    print(f"{len(series.order)} patches, series {series.hash[:12]}", file=sys.stderr)
    if args.report:
        report = {
            "name": path.name,
            "version": series.pin.patched_version(args.target),
            "size": path.stat().st_size,
            "sha256": file_sha256(path),
            "series": series.hash,
        }
        args.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(path)
    return 0
