"""Hold a generate answer against CONTRACT.md: fields, encoding, dtype, counts.

Stricter than `vllm_r3.client`, which reads whatever servers in the field send: here any
departure from the promised form (layout split, encoding npy) is an error. Needs numpy.

P prompt tokens, G generated tokens of a choice, L layers, K experts chosen.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_r3.errors import R3Error

META_FIELDS = (
    "num_layers",
    "moe_layers",
    "num_experts",
    "top_k",
    "dtype",
    "encoding",
    "layout",
)


class ContractBroken(R3Error):
    """An answer that is not what CONTRACT.md promises."""


def read_npy(text: Any, where: str) -> np.ndarray:
    """Decode one base64 `.npy` field, which must be format 1.0 in C order."""
    if not isinstance(text, str):
        raise ContractBroken(f"{where}: expected a base64 string, got {type(text).__name__}")
    try:
        blob = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ContractBroken(f"{where}: expected padded standard base64, got {error}") from None
    if blob[:8] != b"\x93NUMPY\x01\x00":
        raise ContractBroken(f"{where}: expected npy format 1.0, got {blob[:8]!r}")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(blob[8:]))
    if fortran or dtype.str not in ("|u1", "<i2"):
        raise ContractBroken(
            f"{where}: expected C order and |u1 or <i2, got fortran_order={fortran}, {dtype.str}"
        )
    rows = np.load(io.BytesIO(blob), allow_pickle=False)
    if rows.shape != shape or rows.ndim != 3:
        raise ContractBroken(f"{where}: expected three axes (rows, L, K), got {shape}")
    return rows


def check_meta(answer: Mapping[str, Any], info: Mapping[str, Any], start: int = 0) -> None:
    """`routed_experts_meta` says what `/routed_experts/info` said, and the start."""
    expected = {"start": start} | {name: info[name] for name in META_FIELDS}
    found = answer.get("routed_experts_meta")
    if found != expected:
        raise ContractBroken(f"routed_experts_meta: expected {expected}, got {found}")


def read_split_answer(
    answer: Mapping[str, Any], info: Mapping[str, Any], num_prompt: int, start: int = 0
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return prompt rows (P - start, L, K) and, per choice, rows (G - 1, L, K).

    Args:
        answer: parsed body of `/inference/v1/generate`, layout split, encoding npy.
        info: parsed body of `/routed_experts/info`.

    Raises:
        ContractBroken: with the field, what was expected and what was found.
    """
    check_meta(answer, info, start)
    sides = (info["num_layers"], info["top_k"])
    prompt = read_npy(answer.get("prompt_routed_experts"), "prompt_routed_experts")
    _check(prompt, num_prompt - start, sides, info["dtype"], "prompt_routed_experts")
    choices = []
    for choice in answer["choices"]:
        where = f"choices[{choice['index']}].routed_experts"
        rows = read_npy(choice.get("routed_experts"), where)
        _check(rows, len(choice["token_ids"]) - 1, sides, info["dtype"], where)
        choices.append(rows)
    return prompt, choices


def _check(rows: np.ndarray, count: int, sides: tuple[int, int], dtype: str, where: str) -> None:
    if rows.shape != (count, *sides) or rows.dtype != np.dtype(dtype):
        raise ContractBroken(
            f"{where}: expected {dtype} {(count, *sides)}, got {rows.dtype} {rows.shape}"
        )
