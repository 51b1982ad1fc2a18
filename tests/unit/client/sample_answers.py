"""Answers as the servers of the field send them, built from one known array."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import pytest

from vllm_r3.client import RoutesError
from vllm_r3.errors import R3Error


def refused(message: str, error: type[R3Error] = RoutesError) -> pytest.RaisesExc:
    """Expect an error of this type with exactly this message."""
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def rows_of(
    count: int, layers: int = 3, top_k: int = 2, experts: int = 16, first: int = 0
) -> np.ndarray:
    """Rows whose ids depend on token, layer and place, so that no shift can hide."""
    token = np.arange(first, first + count)[:, None, None]
    layer = np.arange(layers)[None, :, None]
    place = np.arange(top_k)[None, None, :]
    ids = (token * 5 + layer * 3 + place) % experts
    return ids.astype(np.uint8 if experts <= 256 else np.int16)


def npy(array: np.ndarray) -> str:
    """Base64 of the npy blob, as this project and vLLM 0.22 and newer send it."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def nested(array: np.ndarray) -> list:
    """Nested JSON lists, as encoding `list` and stock 0.21 send them."""
    return array.tolist()


def bare(array: np.ndarray) -> str:
    """Base64 of little-endian int32 without a header, as SGLang sends it."""
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


def split_answer(
    rows: np.ndarray, prompt: int, start: int = 0, encode: Any = npy, **more: Any
) -> dict[str, Any]:
    """This project's default answer for `len(rows) + 1` tokens."""
    tokens = len(rows) + 1
    return {
        "request_id": "req-1",
        "prompt_routed_experts": encode(rows[start:prompt]),
        "choices": [
            {
                "index": 0,
                "token_ids": list(range(100 + prompt, 100 + tokens)),
                "finish_reason": "length",
                "routed_experts": encode(rows[prompt:]),
                **more,
            }
        ],
        "routed_experts_meta": meta(rows, start, layout="split"),
    }


def full_answer(rows: np.ndarray, prompt: int, start: int = 0) -> dict[str, Any]:
    """The answer of vLLM 0.22 and newer: one buffer, no meta."""
    tokens = len(rows) + 1
    choice = {
        "index": 0,
        "token_ids": list(range(100 + prompt, 100 + tokens)),
        "finish_reason": "stop",
        "routed_experts": npy(rows[start:]),
    }
    return {"request_id": "req-1", "choices": [choice]}


def sglang_answer(rows: np.ndarray, prompt: int, start: int = 0) -> dict[str, Any]:
    """SGLang's `/generate` answer."""
    tokens = len(rows) + 1
    return {
        "text": "…",
        "output_ids": list(range(100 + prompt, 100 + tokens)),
        "meta_info": {
            "id": "sg-1",
            "prompt_tokens": prompt,
            "completion_tokens": tokens - prompt,
            "finish_reason": {"type": "length", "length": tokens - prompt},
            "weight_version": "7",
            "routed_experts": bare(rows[start:]),
        },
    }


def meta(
    rows: np.ndarray, start: int = 0, layout: str = "split", experts: int = 16
) -> dict[str, Any]:
    """`routed_experts_meta` for these rows, all layers MoE."""
    _, layers, top_k = rows.shape
    return {
        "start": start,
        "num_layers": layers,
        "moe_layers": list(range(layers)),
        "num_experts": experts,
        "top_k": top_k,
        "dtype": str(rows.dtype),
        "encoding": "npy",
        "layout": layout,
    }
