"""Lay rows out as a Megatron rank sees its tokens: padded, then cut for parallelism.

    sample        rows of tokens [0, S - 1), then one made row for the last token, which has none
    context       2 x cp chunks of a sample, rank r takes chunk r and chunk 2 x cp - 1 - r
    sequence      the rank's tokens in tp equal runs, rank t takes run t

Made rows hold K different valid ids, spread over the experts: zeros would send all padding to
expert 0 and, for K > 1, name it twice, which breaks the token counts of Megatron's dispatcher.
T tokens of this rank, L decoder layers, K top-k, E experts. It imports numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_r3.client.shape import RoutesError, check_ids


@dataclass(frozen=True)
class Slicing:
    """Where this rank stands in context (cp) and tensor (tp) parallelism.

    With `sequence_parallel` the router sees 1 / tp_size of the tokens; the packed length of a rank
    is padded to tp_size x `pad_multiple`.
    """

    cp_size: int = 1
    cp_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False
    pad_multiple: int = 1

    def __post_init__(self) -> None:
        for kind in ("cp", "tp"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if size < 1 or not 0 <= rank < size:
                raise RoutesError(f"{kind}_rank must be in [0, {kind}_size), got {rank} of {size}")
        if self.pad_multiple < 1:
            raise RoutesError(f"pad_multiple must be 1 or more, got {self.pad_multiple}")


WHOLE = Slicing()


def padding_rows(rows: int, num_layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """Make rows of K different valid ids, the next row starting where the last one ended."""
    if not 0 < top_k <= num_experts:
        raise RoutesError(
            f"top_k must be in [1, {num_experts}] to pad with different ids, got {top_k}"
        )
    ids = (np.arange(rows)[:, None] * top_k + np.arange(top_k)) % num_experts
    return np.broadcast_to(ids[:, None], (rows, num_layers, top_k)).astype(np.int64)


def pack_rows(
    samples: Sequence[np.ndarray], num_experts: int, slicing: Slicing = WHOLE
) -> np.ndarray:
    """Lay samples (S_i - 1, L, K) end to end, as packed (thd) batches are.

    Returns:
        (T, L, K) int64 for this rank's T tokens, in the router's order.
    """
    _check_samples(samples, num_experts)
    closed = [_closed(rows, len(rows) + 1, num_experts) for rows in samples]
    packed = np.concatenate([_context_share(rows, slicing, num_experts) for rows in closed])
    step = slicing.tp_size * slicing.pad_multiple
    packed = _closed(packed, -(-len(packed) // step) * step, num_experts)
    return _sequence_share(packed, slicing)


def batch_rows(
    samples: Sequence[np.ndarray],
    seq_len: int,
    num_experts: int,
    slicing: Slicing = WHOLE,
    offsets: Sequence[int] | None = None,
) -> np.ndarray:
    """Lay samples (S_i - 1, L, K) out as a padded batch; Megatron's layers hold [seq_len, B, H].

    `seq_len` is the padded length, a multiple of 2 x cp_size where cp_size > 1; `offsets` the
    position of each sample's first token (left padding), default 0.

    Returns:
        (T, L, K) int64, T = seq_len / cp (/ tp with sequence parallelism) x B, position outermost.
    """
    _check_samples(samples, num_experts)
    offsets = [0] * len(samples) if offsets is None else list(offsets)
    if slicing.cp_size > 1 and seq_len % (2 * slicing.cp_size):
        raise RoutesError(f"seq_len must be a multiple of 2 x {slicing.cp_size}, got {seq_len}")
    columns = []
    for index, (rows, offset) in enumerate(zip(samples, offsets, strict=True)):
        if not 0 <= offset <= seq_len - len(rows) - 1:
            tokens = f"{len(rows) + 1} tokens from position {offset}"
            raise RoutesError(f"sample {index}: {tokens} do not fit in {seq_len}")
        column = padding_rows(seq_len, *rows.shape[1:], num_experts)
        column[offset : offset + len(rows)] = rows
        columns.append(_context_share(column, slicing, num_experts))
    batch = _sequence_share(np.stack(columns, axis=1), slicing)
    return batch.reshape(-1, *batch.shape[2:])


def _check_samples(samples: Sequence[np.ndarray], num_experts: int) -> None:
    if not samples:
        raise RoutesError("expected at least one sample, got none")
    for index, rows in enumerate(samples):
        if rows.ndim != 3 or rows.shape[1:] != samples[0].shape[1:]:
            expected = ", ".join(map(str, samples[0].shape[1:]))
            raise RoutesError(
                f"sample {index}: expected rows (S - 1, {expected}), got {rows.shape}"
            )
        check_ids(rows, num_experts, f"sample {index}")


def _closed(rows: np.ndarray, length: int, num_experts: int) -> np.ndarray:
    made = padding_rows(length - len(rows), *rows.shape[1:], num_experts)
    return np.concatenate([rows.astype(np.int64, copy=False), made])


def _context_share(rows: np.ndarray, slicing: Slicing, num_experts: int) -> np.ndarray:
    if slicing.cp_size == 1:
        return rows
    chunks = 2 * slicing.cp_size
    rows = _closed(rows, -(-len(rows) // chunks) * chunks, num_experts)
    parts = np.split(rows, chunks)
    return np.concatenate([parts[slicing.cp_rank], parts[chunks - 1 - slicing.cp_rank]])


def _sequence_share(rows: np.ndarray, slicing: Slicing) -> np.ndarray:
    if not slicing.sequence_parallel:
        return rows
    if len(rows) % slicing.tp_size:
        raise RoutesError(
            f"sequence parallelism needs a multiple of {slicing.tp_size} positions, got {len(rows)}"
        )
    return np.split(rows, slicing.tp_size)[slicing.tp_rank]
