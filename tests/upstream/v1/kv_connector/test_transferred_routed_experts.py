# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of routed experts that travel in kv_transfer_params."""

import base64
import io

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_connector.routed_experts import (
    PARAM,
    get_transferred_rows,
    pack_routed_experts,
)
from vllm.v1.routed_experts import RoutedExpertsInfo

SMALL = RoutedExpertsInfo(num_layers=3, moe_layers=[1, 2], num_experts=8, top_k=2)
LARGE = RoutedExpertsInfo(num_layers=2, moe_layers=[0, 1], num_experts=300, top_k=4)


def some_rows(info: RoutedExpertsInfo, num_tokens: int = 10) -> np.ndarray:
    rng = np.random.default_rng(0)
    shape = (num_tokens, *info.row_shape)
    return rng.integers(0, info.num_experts, shape).astype(info.dtype)


def npy(rows: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, rows, **options)
    return file.getvalue()


def text(blob: bytes) -> str:
    return base64.b64encode(blob).decode()


@pytest.mark.parametrize("info", [SMALL, LARGE], ids=["uint8", "int16"])
def test_rows_arrive_as_they_were_sent(info):
    rows = some_rows(info)
    params = {PARAM: pack_routed_experts(rows)}
    for start, stop in ((0, 10), (4, 9), (10, 10)):
        found = get_transferred_rows(params, info, start, stop)
        assert found.dtype == rows.dtype and np.array_equal(found, rows[start:stop])
    assert isinstance(params[PARAM], np.ndarray), "unpacked again for every call"


ROWS = some_rows(SMALL)
BLOB = npy(ROWS)
HUGE = BLOB.replace(b"(10, 3, 2), }          ", b"(9999999999999, 3, 2), }")
BAD = {
    "missing": None,
    "no text": [1, 2],
    "no base64": "***",
    "not ASCII": "é",
    "empty": "",
    "magic alone": text(b"\x93NUMPY"),
    "another version": text(BLOB.replace(b"\x93NUMPY\x01", b"\x93NUMPY\x02")),
    "no header": text(BLOB.replace(b"descr", b"dexcr")),
    "broken header": text(BLOB.replace(b"{", b"(")),
    "huge": text(HUGE),
    "negative": text(BLOB.replace(b"(10, 3, 2)", b"(-1, 3, 2)")),
    "no shape": text(BLOB.replace(b"(10, 3, 2)", b"()        ")),
    "cut off": text(BLOB[:-1]),
    "objects": text(npy(np.array([{}]), allow_pickle=True)),
    "other dtype": text(npy(ROWS.astype(np.int16))),
    "other layers": text(npy(ROWS[:, 1:])),
    "Fortran order": text(npy(np.asfortranarray(ROWS))),
    "no such expert": text(npy(ROWS + np.uint8(8))),
    "too few": text(npy(ROWS[:-1])),
}


@pytest.mark.parametrize("bad", BAD)
def test_rows_that_are_of_no_use_are_none(bad):
    params = {PARAM: BAD[bad]}
    assert get_transferred_rows(params, SMALL, 0, 10) is None
    assert get_transferred_rows(params, SMALL, 0, 10) is None, "the second time"


def test_negative_expert_ids_are_refused():
    rows = some_rows(LARGE)
    rows[3, 1, 2] = -1
    assert (
        get_transferred_rows({PARAM: pack_routed_experts(rows)}, LARGE, 0, 10) is None
    )
