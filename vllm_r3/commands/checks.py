"""`vllm-r3 verify`, `compare`, `inspect`, `replay` and `demo`: can these rows be trusted?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add every command of this module."""
    verify = subparsers.add_parser("verify", help="check a rollout file or a running server")
    verbs = verify.add_subparsers(metavar="VERB", required=True)

    text = "judge every sample of a slime or vime debug file (.pt)"
    add = _command(verbs, "rollout", verify_rollout, text)
    add("file", help="as written by --save-debug-rollout-data; loaded without running it")
    _add_shape(add, required=True)
    text = "samples that must hold rows (default: every one that was not aborted)"
    add("--min-samples-with-routing", type=int, metavar="N", help=text)
    add("--all", action="store_true", help="print the good verdicts too")

    text = "ask a server on every endpoint and check its rows"
    add = _command(verbs, "server", verify_server, text)
    add("url", help="its address, as http://127.0.0.1:8000")
    _add_lengths(add, 300, 8, "; the warm check needs more than one KV block")
    text = "share of (row, layer) cells that may differ between two answers (default: 0, right for "
    text += "float32; low precision may flip near ties)"
    add("--max-differing", type=float, default=0.0, metavar="SHARE", help=text)
    add("--timeout", type=float, default=600.0, help="seconds a request (default: 600)")

    text = "compare the rows of two servers, vLLM or SGLang"
    add = _command(subparsers, "compare", compare, text)
    add("url_a", help="one server")
    add("url_b", help="the other, with the same model")
    _add_lengths(add, 64, 32)
    text = "share of rows that must agree in every layer (default: 1; exit 1 below)"
    add("--min-agreement", type=float, default=1.0, metavar="SHARE", help=text)
    _add_shape(add)

    text = "show expert load and entropy of each layer"
    add = _command(subparsers, "inspect", inspect, text)
    add("source", help="a rollout (.pt), rows (.npy), an answer (.json) or an address http://...")
    add("--png", metavar="FILE", help="draw a heat map too (needs the plot extra)")
    _add_shape(add)

    text = "replay a server's rows in transformers and measure"
    add = _command(subparsers, "replay", replay, text)
    add("model", help="the model that the server serves, a directory or a name")
    add("--server", required=True, metavar="URL", help="the server")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    text = "of the transformers model (default: auto, the checkpoint's; use the server's)"
    add("--dtype", default="auto", choices=dtypes, help=text)
    add("--texts", type=int, default=8, help="texts to sample (default: 8)")
    _add_lengths(add, 48, 32)
    add("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write the numbers here too")
    add("--png", metavar="FILE", help="draw them by position (needs the plot extra)")

    text = "serve a tiny MoE model and compare every returned row with an oracle"
    add = _command(subparsers, "demo", demo, text)
    text = "which tiny model (default: moe; also dense-between, wide, glm4, …)"
    add("--model", default="moe", metavar="KIND", help=text)
    add("--port", type=int, help="loopback port (default: a free one)")
    add("--keep", type=Path, metavar="DIR", help="leave the model and the server's log here")


def _command(
    subparsers: argparse._SubParsersAction, name: str, run: Callable[..., int], text: str
) -> Callable[..., Any]:
    parser = subparsers.add_parser(name, help=text)
    parser.set_defaults(func=run)
    return parser.add_argument


def _add_lengths(add: Callable[..., Any], prompt: int, generated: int, note: str = "") -> None:
    text = f"prompt length (default: {prompt}){note}"
    add("--prompt-tokens", type=int, default=prompt, help=text)
    text = f"tokens to generate (default: {generated})"
    add("--max-tokens", type=int, default=generated, help=text)


def _add_shape(add: Callable[..., Any], *, required: bool = False) -> None:
    """Add what describes a model, named as Megatron names it."""
    add("--num-layers", type=int, required=required, help="decoder layers, dense ones too")
    add("--moe-router-topk", type=int, required=required, help="experts per token")
    add("--num-experts", type=int, help="logical experts (default: not checked)")
    text = "layers that route, from 0, as 3-47 or 1,3,5-9 (default: all)"
    add("--moe-layers", type=layer_numbers, metavar="LIST", help=text)


def layer_numbers(text: str) -> tuple[int, ...]:
    """Read `1,3,5-9`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            numbers += range(int(first), int(last or first) + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected layers as 1,3,5-9, got {text!r}") from None
    return tuple(numbers)


def _shape_of(args: argparse.Namespace) -> Any:
    from vllm_r3.client import RouteShape

    return RouteShape(args.num_layers, args.moe_router_topk, args.num_experts, args.moe_layers)


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def _print(lines: list[str], passed: bool = True) -> int:
    print("\n".join(lines))
    return 0 if passed else 1


def verify_rollout(args: argparse.Namespace) -> int:
    """Print the verdicts; 0 when the file passes."""
    from vllm_r3.checks.rollout import verify_rollout

    report = verify_rollout(args.file, _shape_of(args), args.min_samples_with_routing)
    return _print(report.lines(args.all), report.passed)


def verify_server(args: argparse.Namespace) -> int:
    """Print every check's outcome; 0 when all passed."""
    from vllm_r3.checks.server import verify_server

    named = _given(args, "prompt_tokens", "max_tokens", "max_differing", "timeout")
    report = verify_server(args.url, **named)
    return _print(report.lines(), report.passed)


def compare(args: argparse.Namespace) -> int:
    """Print the comparison; 0 when the servers agree."""
    from vllm_r3.checks.compare import compare_servers

    sizes = _given(args, "prompt_tokens", "max_tokens")
    found = compare_servers(args.url_a, args.url_b, shape=_shape_of(args), **sizes)
    return _print(found.lines(), found.passed(args.min_agreement))


def inspect(args: argparse.Namespace) -> int:
    """Print the table."""
    from vllm_r3.checks.inspect import expert_load, heat_map, read_rows

    load = expert_load(*read_rows(args.source, _shape_of(args)))
    if args.png:
        heat_map(load, args.png)
        print(f"heat map: {args.png}", file=sys.stderr)
    return _print(load.lines())


def replay(args: argparse.Namespace) -> int:
    """Print both mismatches; 0 when replaying does not raise it."""
    from vllm_r3.replay.replay import plot, replay

    named = _given(args, "dtype", "texts", "prompt_tokens", "max_tokens", "seed")
    report = replay(args.model, args.server, **named)
    if args.json:
        args.json.write_text(json.dumps(vars(report), indent=1) + "\n", encoding="utf-8")
    if args.png:
        plot(report, args.png)
        print(f"plot: {args.png}", file=sys.stderr)
    return _print(report.lines(), report.passed)


def demo(args: argparse.Namespace) -> int:
    """Run the whole demo; 0 only if every row agrees."""
    from vllm_r3.demo.demo import demo

    demo(args.model, args.port, args.keep)
    return 0
