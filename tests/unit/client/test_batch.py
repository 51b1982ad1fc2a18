"""Rows land where a Megatron rank's tokens are, for every cut, and padding is never zeros."""

from __future__ import annotations

import numpy as np
import pytest
from sample_answers import refused, rows_of

from vllm_r3.adapters.batch import Slicing, batch_rows, pack_rows, padding_rows

E = 16


def distinct(rows: np.ndarray) -> bool:
    ordered = np.sort(rows, axis=-1)
    return bool((ordered[..., 1:] != ordered[..., :-1]).all())


@pytest.mark.parametrize(("top_k", "experts"), [(1, 1), (2, 3), (8, 8), (8, 128), (8, 257)])
def test_padding_rows_hold_different_valid_ids(top_k: int, experts: int) -> None:
    rows = padding_rows(40, 3, top_k, experts)
    assert rows.shape == (40, 3, top_k) and rows.dtype == np.int64
    assert distinct(rows) and rows.min() >= 0 and rows.max() < experts


def test_padding_rows_spread_over_all_experts() -> None:
    load = np.bincount(padding_rows(64, 1, 2, 16).ravel(), minlength=16)
    assert load.min() == load.max() == 8


@pytest.mark.parametrize("top_k", [0, 17])
def test_a_top_k_that_cannot_be_different_is_refused(top_k: int) -> None:
    with refused(f"top_k must be in [1, 16] to pad with different ids, got {top_k}"):
        padding_rows(1, 1, top_k, E)


def test_packing_adds_one_made_row_for_each_last_token() -> None:
    one, two = rows_of(4), rows_of(6, first=9)
    packed = pack_rows([one, two], E)
    assert packed.shape == (12, 3, 2) and packed.dtype == np.int64
    np.testing.assert_array_equal(packed[:4], one)
    np.testing.assert_array_equal(packed[5:11], two)
    assert distinct(packed[[4, 11]])


@pytest.mark.parametrize(("tokens", "multiple", "length"), [(8, 8, 8), (9, 8, 16), (7, 8, 8)])
def test_packing_pads_to_the_multiple(tokens: int, multiple: int, length: int) -> None:
    packed = pack_rows([rows_of(tokens - 1)], E, Slicing(pad_multiple=multiple))
    assert len(packed) == length and distinct(packed)


@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("tokens", [11, 12, 13])
def test_context_shares_together_are_the_sample(cp_size: int, tokens: int) -> None:
    rows = rows_of(tokens - 1)
    size = -(-tokens // (2 * cp_size))
    whole = np.full((2 * cp_size * size, 3, 2), -1)
    for rank in range(cp_size):
        share = pack_rows([rows], E, Slicing(cp_size=cp_size, cp_rank=rank))
        assert len(share) == 2 * size
        for half, chunk in enumerate((rank, 2 * cp_size - 1 - rank)):
            whole[chunk * size : (chunk + 1) * size] = share[half * size : (half + 1) * size]
    np.testing.assert_array_equal(whole[: tokens - 1], rows)
    assert distinct(whole[tokens - 1 :]) and (whole >= 0).all()


def test_each_packed_sample_is_cut_for_context_on_its_own() -> None:
    one, two = rows_of(7), rows_of(15, first=9)
    slicing = Slicing(cp_size=2, cp_rank=1)
    both = pack_rows([one, two], E, slicing)
    apart = [pack_rows([rows], E, slicing) for rows in (one, two)]
    np.testing.assert_array_equal(both, np.concatenate(apart))


def test_sequence_shares_joined_are_the_packed_rank() -> None:
    samples = [rows_of(6), rows_of(9, first=3)]
    whole = pack_rows(samples, E, Slicing(tp_size=4))
    shares = [
        pack_rows(samples, E, Slicing(tp_size=4, tp_rank=rank, sequence_parallel=True))
        for rank in range(4)
    ]
    assert len(whole) == 20
    np.testing.assert_array_equal(np.concatenate(shares), whole)


def test_without_sequence_parallelism_every_tensor_rank_sees_all_tokens() -> None:
    shares = [pack_rows([rows_of(7)], E, Slicing(tp_size=2, tp_rank=rank)) for rank in (0, 1)]
    np.testing.assert_array_equal(*shares)


def test_a_padded_batch_lies_position_outermost() -> None:
    one, two = rows_of(5), rows_of(3, first=7)
    batch = batch_rows([one, two], 8, E).reshape(8, 2, 3, 2)
    np.testing.assert_array_equal(batch[:5, 0], one)
    np.testing.assert_array_equal(batch[:3, 1], two)
    assert distinct(batch)


def test_left_padding_moves_each_sample_to_its_offset() -> None:
    one, two = rows_of(5), rows_of(3, first=7)
    batch = batch_rows([one, two], 8, E, offsets=[2, 4]).reshape(8, 2, 3, 2)
    np.testing.assert_array_equal(batch[2:7, 0], one)
    np.testing.assert_array_equal(batch[4:7, 1], two)
    assert distinct(batch)


@pytest.mark.parametrize(("offset", "fits"), [(2, True), (3, False), (-1, False)])
def test_a_sample_must_fit_with_its_last_token(offset: int, fits: bool) -> None:
    if fits:
        batch_rows([rows_of(5)], 8, E, offsets=[offset])
        return
    with refused(f"sample 0: 6 tokens from position {offset} do not fit in 8"):
        batch_rows([rows_of(5)], 8, E, offsets=[offset])


def test_a_padded_batch_is_cut_for_context_then_sequence() -> None:
    samples = [rows_of(11), rows_of(7, first=5)]
    whole = batch_rows(samples, 16, E).reshape(16, 2, 3, 2)
    for cp_rank in (0, 1):
        for tp_rank in (0, 1):
            slicing = Slicing(2, cp_rank, 2, tp_rank, sequence_parallel=True)
            share = batch_rows(samples, 16, E, slicing).reshape(4, 2, 3, 2)
            chunk = (cp_rank, 3 - cp_rank)[tp_rank]
            np.testing.assert_array_equal(share, whole[chunk * 4 : chunk * 4 + 4])


def test_lengths_that_do_not_divide_are_refused() -> None:
    with refused("seq_len must be a multiple of 2 x 2, got 6"):
        batch_rows([rows_of(3)], 6, E, Slicing(cp_size=2))
    with refused("sequence parallelism needs a multiple of 4 positions, got 6"):
        batch_rows([rows_of(3)], 6, E, Slicing(tp_size=4, sequence_parallel=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cp_size": 2, "cp_rank": 2}, "cp_rank must be in [0, cp_size), got 2 of 2"),
        ({"tp_size": 0}, "tp_rank must be in [0, tp_size), got 0 of 0"),
        ({"pad_multiple": 0}, "pad_multiple must be 1 or more, got 0"),
    ],
)
def test_an_impossible_rank_is_refused(values: dict, message: str) -> None:
    with refused(message):
        Slicing(**values)


def test_samples_must_be_rows_of_one_model_with_valid_ids() -> None:
    with refused("expected at least one sample, got none"):
        pack_rows([], E)
    with refused("sample 1: expected rows (S - 1, 3, 2), got (4, 4, 2)"):
        pack_rows([rows_of(4), rows_of(4, layers=4)], E)
    with refused("sample 0: expected expert ids in [0, 4), got 4 at row 0, layer 1"):
        pack_rows([rows_of(8)], 4)


def test_a_sample_of_one_token_is_one_made_row() -> None:
    packed = pack_rows([rows_of(0)], E)
    assert packed.shape == (1, 3, 2) and distinct(packed)
