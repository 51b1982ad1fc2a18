"""Rows for slime and vime: fill samples, and start servers with what that needs.

Both frameworks carry `(len(tokens) - 1, num_layers, moe_router_topk)` int32 with each sample, and
put the server's `--vllm-...` overrides on their arguments as `vllm_...`. Nothing of either is
imported: samples and arguments are used by attribute. It imports numpy only.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_r3.client import (
    ChoiceRoutes,
    RoutesError,
    RouteShape,
    RowFiles,
    StreamedAnswer,
    decode_choice,
)

FIELD = "rollout_routed_experts"


def assign_routed_experts(
    sample: Any,
    response: Any,
    args: Any,
    *,
    start: int | None = None,
    choice: int = 0,
    dtype: Any = np.int32,
    files: RowFiles | None = None,
) -> str:
    """Set `sample.rollout_routed_experts` from the answer that ended `sample.tokens`.

    Call it after the answer's tokens were appended to `sample.tokens`. Rows before the answer's
    start are kept from what the sample held (an earlier turn, the part before a resume), rows from
    there on are the answer's, so a resumed rollout has none twice.

    Args:
        sample: has `tokens` and `rollout_routed_experts` (None, array, tensor, list of either).
        response: the parsed body of any server that `vllm_r3.client` reads, or a `StreamedAnswer`:
            of a stream that was cut the sample gets the rows of the tokens that came.
        args: has `num_layers`, `moe_router_topk` and, optionally, `num_experts`, `moe_layer_freq`.
        start: the start that was sent; default: what the answer says, else 0.
        choice: which choice the sample took.
        dtype: of the result; both frameworks use int32.
        files: where rows in encoding `file` are read.

    Returns:
        A note: empty, or why an aborted request left the sample without new rows.

    Raises:
        RoutesError: the rows do not fit the sample; it is left as it was.
    """
    index = getattr(sample, "index", None)
    name = "sample" if index is None else f"sample {index}"
    if isinstance(response, StreamedAnswer):
        response = response.answer(cut=True)
    tokens = list(sample.tokens)
    routes = _decode(response, tokens, args, start, choice, name, files or RowFiles())
    if routes.rows is None:
        return routes.note
    first = routes.count.start
    result = np.empty((max(0, len(tokens) - 1), args.num_layers, args.moe_router_topk), dtype)
    if first:
        held = held_rows(getattr(sample, FIELD, None))
        found = (0, *result.shape[1:]) if held is None else held.shape
        if len(found) != 3 or found[0] < first or found[1:] != result.shape[1:]:
            raise RoutesError(
                f"{name}: expected at least {(first, *result.shape[1:])} held rows before start "
                f"{first}, got {tuple(found)}"
            )
        result[:first] = held[:first]
    result[first:] = routes.rows
    setattr(sample, FIELD, result)
    return ""


def held_rows(value: Any) -> np.ndarray | None:
    """Read what a sample holds: None, an array, a tensor, lists, or a list of chunks."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "shape"):
        return np.concatenate([held_rows(chunk) for chunk in value])
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except ValueError:
        return np.empty(0, dtype=object)  # ragged: no caller takes it for rows


def _decode(
    response: Any,
    tokens: list[int],
    args: Any,
    start: int | None,
    choice: int,
    name: str,
    files: RowFiles,
) -> ChoiceRoutes:
    shape = RouteShape.from_args(args)
    if shape.num_layers is None or shape.top_k is None:
        raise RoutesError(f"{name}: args must have num_layers and moe_router_topk")
    num_prompt = None  # of the sample, where the answer leaves it out as the generate endpoint does
    for part in response.get("choices") or [] if isinstance(response, dict) else []:
        if part.get("index", 0) == choice and part.get("token_ids") is not None:
            num_prompt = len(tokens) - len(part["token_ids"])
    known = dict(num_prompt=num_prompt, start=start, shape=shape, request=name, files=files)
    routes = decode_choice(response, choice, **known)
    count, generated = routes.count, list(routes.token_ids or [])
    if routes.rows is not None and count.num_tokens != len(tokens):
        raise RoutesError(
            f"{name}: expected an answer that ends at {len(tokens)} tokens, got "
            f"{count.num_prompt} + {count.num_generated}: append its tokens to sample.tokens first"
        )
    if routes.rows is not None and tokens[len(tokens) - len(generated) :] != generated:
        raise RoutesError(
            f"{name}: expected sample.tokens to end with the answer's {len(generated)} tokens, "
            "got others"
        )
    return routes


# flag, argument: passed on as the user asked, never added on our own; all but two are ours alone
_ASKED = [
    ("--enable-expert-parallel", "vllm_enable_expert_parallel"),
    ("--expert-placement-strategy", "vllm_expert_placement_strategy"),
    ("--routed-experts-encoding", "vllm_routed_experts_encoding"),
    ("--routed-experts-layout", "vllm_routed_experts_layout"),
    ("--routed-experts-dir", "vllm_routed_experts_dir"),
    ("--routed-experts-file-ttl", "vllm_routed_experts_file_ttl"),
    ("--routed-experts-dir-bytes", "vllm_routed_experts_dir_bytes"),
]
# flag, argument, what stock 0.21.0 must be told for rows to come out whole
_STOCK_021 = [
    ("--no-async-scheduling", "vllm_async_scheduling", "stock 0.21 refuses it with routed experts"),
    ("--no-enable-prefix-caching", "vllm_enable_prefix_caching", "cached rows come back as zeros"),
]
SERVERS = ("r3", "0.21", "0.22")


def engine_flags(args: Any, *, server: str = "r3") -> list[str]:
    """Turn a framework's arguments into the server flags that routing replay needs.

    Args:
        args: `use_rollout_routing_replay`, and the user's `--vllm-...` overrides as `vllm_...`.
        server: `r3` (this project), `0.21` (stock) or `0.22` (stock, 0.22 and newer).

    Returns:
        Flags to append, none when replay is off. Only `--enable-return-routed-experts` is added on
        our own; on stock 0.21 also what it needs, unless the user set it, which is kept and warned
        of. Expert parallelism, placement, and how rows are sent, follow the user alone. An
        unchanged vime reads one buffer: pass it `--vllm-routed-experts-layout full`.

    Raises:
        RoutesError: `server` is none of the three.
    """
    if server not in SERVERS:
        raise RoutesError(f"server must be one of {', '.join(SERVERS)}, got {server}")
    if not getattr(args, "use_rollout_routing_replay", False):
        return []
    flags = ["--enable-return-routed-experts"]
    for flag, name in _ASKED if server == "r3" else _ASKED[:2]:
        value = getattr(args, name, None)
        if _overrode(args, name) and value not in (None, False):
            flags += [flag] if value is True else [flag, str(value)]
    for flag, name, why in _STOCK_021 if server == "0.21" else []:
        if not _overrode(args, name):
            flags.append(flag)
        elif getattr(args, name):
            warnings.warn(f"--{name.replace('_', '-')} is kept as set, but {why}", stacklevel=2)
    return flags


def _overrode(args: Any, name: str) -> bool:
    """Return whether the user named this flag: vime lists those, else any value but None counts."""
    provided: Sequence[str] | None = getattr(args, "_vllm_user_provided", None)
    return getattr(args, name, None) is not None if provided is None else name in provided
