"""Reading an answer by the letter of the contract."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest

from vllm_r3.contract import ContractBroken, read_npy, read_split_answer

INFO = {
    "enabled": True,
    "num_layers": 3,
    "moe_layers": [0, 2],
    "num_experts": 8,
    "top_k": 2,
    "dtype": "uint8",
    "encoding": "npy",
    "layout": "split",
    "version": "0.21.0+r3.1",
}
META = {
    "start": 0,
    "num_layers": 3,
    "moe_layers": [0, 2],
    "num_experts": 8,
    "top_k": 2,
    "dtype": "uint8",
    "encoding": "npy",
    "layout": "split",
}


def npy(rows: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


def rows_of(count: int, dtype: str = "uint8") -> np.ndarray:
    return np.arange(count * 6).reshape(count, 3, 2).astype(dtype)


def answer(prompt: int, generated: int, dtype: str = "uint8", **changes) -> dict:
    whole = {
        "prompt_routed_experts": npy(rows_of(prompt, dtype)),
        "choices": [
            {
                "index": 0,
                "token_ids": [5] * (generated + 1),
                "routed_experts": npy(rows_of(generated, dtype)),
            }
        ],
        "routed_experts_meta": META,
    }
    return whole | changes


def test_split_answer_is_read():
    prompt, (generated,) = read_split_answer(answer(4, 2), INFO, 4)
    assert np.array_equal(prompt, rows_of(4))
    assert np.array_equal(generated, rows_of(2))


def test_one_generated_token_has_an_empty_array():
    _, (generated,) = read_split_answer(answer(4, 0), INFO, 4)
    assert generated.shape == (0, 3, 2)


def test_start_shortens_the_prompt_rows():
    shorter = answer(1, 2, routed_experts_meta=META | {"start": 3})
    prompt, _ = read_split_answer(shorter, INFO, 4, start=3)
    assert len(prompt) == 1


@pytest.mark.parametrize("prompt", [3, 5])
def test_wrong_number_of_prompt_rows_is_refused(prompt):
    message = f"prompt_routed_experts: expected uint8 (4, 3, 2), got uint8 ({prompt}, 3, 2)"
    with pytest.raises(ContractBroken, match=f"^{re.escape(message)}$"):
        read_split_answer(answer(prompt, 2), INFO, 4)


def test_other_type_than_announced_is_refused():
    message = "prompt_routed_experts: expected uint8 (4, 3, 2), got int16 (4, 3, 2)"
    with pytest.raises(ContractBroken, match=f"^{re.escape(message)}$"):
        read_split_answer(answer(4, 2, "int16"), INFO, 4)


@pytest.mark.parametrize("name", list(META))
def test_each_field_of_the_meta_must_agree_with_the_info(name):
    wrong = answer(4, 2, routed_experts_meta=META | {name: "other"})
    with pytest.raises(ContractBroken, match="^routed_experts_meta: expected {'start': 0, "):
        read_split_answer(wrong, INFO, 4)


def test_answer_without_rows_is_refused():
    bare = answer(4, 2)
    del bare["prompt_routed_experts"]
    message = "prompt_routed_experts: expected a base64 string, got NoneType"
    with pytest.raises(ContractBroken, match=f"^{message}$"):
        read_split_answer(bare, INFO, 4)


def test_text_that_is_not_base64_is_refused():
    with pytest.raises(ContractBroken, match="^x: expected padded standard base64, got "):
        read_npy("k05VTVBZ*", "x")


def test_bytes_that_are_not_npy_are_refused():
    message = "x: expected npy format 1.0, got b'\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00'"
    with pytest.raises(ContractBroken, match=f"^{re.escape(message)}$"):
        read_npy(base64.b64encode(bytes(200)).decode(), "x")


def test_fortran_order_is_refused():
    with pytest.raises(ContractBroken, match="got fortran_order=True, |u1$"):
        read_npy(npy(np.asfortranarray(rows_of(4))), "x")


@pytest.mark.parametrize("dtype", [">i2", "<i4", "<u2", "<i8"])
def test_other_element_types_are_refused(dtype):
    with pytest.raises(ContractBroken, match=f"got fortran_order=False, {dtype}$"):
        read_npy(npy(rows_of(4, dtype)), "x")


def test_two_axes_are_refused():
    message = "x: expected three axes (rows, L, K), got (4, 6)"
    with pytest.raises(ContractBroken, match=f"^{re.escape(message)}$"):
        read_npy(npy(rows_of(4).reshape(4, 6)), "x")
