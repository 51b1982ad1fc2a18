"""The console script `vllm-r3`: a table of commands and one place where errors end.

Exit status: 0 fine, 1 problems found, 2 wrong usage (argparse's own). Results go to stdout, all
else to stderr. May import any command module; command modules keep heavy imports inside functions,
so that `vllm-r3 --help` needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_r3 import __version__
from vllm_r3.errors import R3Error

# The modules of the commands, in the order of the help text: vllm_r3/commands/NAME.py.
COMMANDS = ("series", "checks")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command of the modules in COMMANDS."""
    parser = argparse.ArgumentParser(
        prog="vllm-r3",
        description="Rollout routing replay on vLLM: the patch series, the client, the checks.",
    )
    parser.add_argument("--version", action="version", version=f"vllm-r3 {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"vllm_r3.commands.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    args = build_parser().parse_args(argv)
    try:
        return args.func(args)
    except R3Error as error:
        print(f"vllm-r3: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 1
