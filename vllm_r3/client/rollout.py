"""Grow one rollout's rows over turns, aborts and resumes, up to the trainer's shape.

    held tokens   t0 ... t(n-2) t(n-1)      the last one has no row yet
    held rows     r0 ... r(n-2)
    next request  start = n - 1             its first row is t(n-1)'s real one

It imports numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_r3.client.decode import decode_choice
from vllm_r3.client.files import NO_FILES, RowFiles
from vllm_r3.client.shape import UNKNOWN, RoutesError, RouteShape
from vllm_r3.client.stream import StreamedAnswer


@dataclass(frozen=True)
class Turn:
    """What one answer did: where it started, rows and tokens it brought, and a note."""

    start: int
    rows: int
    generated: int
    finish_reason: str | None
    note: str = ""


class RolloutRoutes:
    """The routed experts of one rollout while it grows.

    Send `routed_experts_prompt_start=rollout.next_start` with each request, then call `add_turn`.
    When rows come again (a resume that starts earlier, or a server that ignores the start), the new
    ones replace the old from there on, so no row is ever doubled. `versions` holds the weight
    version of each held row, None where the server did not say. `files` says where rows in encoding
    `file` are read.
    """

    def __init__(
        self, shape: RouteShape = UNKNOWN, name: str = "rollout", files: RowFiles = NO_FILES
    ) -> None:
        self.shape = shape
        self.name = name
        self.files = files
        self.tokens: list[int] = []
        self.turns: list[Turn] = []
        self.versions: list[str | None] = []
        self._rows = np.zeros((0, shape.num_layers or 0, shape.top_k or 0), np.uint8)

    @property
    def num_rows(self) -> int:
        """Rows held, for tokens [0, num_rows)."""
        return len(self._rows)

    @property
    def next_start(self) -> int:
        """What to send as `routed_experts_prompt_start` with the next request."""
        return self.num_rows

    @property
    def missing_rows(self) -> int:
        """Rows that the held tokens still need; more than 0 after an abort without rows."""
        return max(0, len(self.tokens) - 1) - self.num_rows

    def add_turn(
        self, prompt: Sequence[int], answer: Any, *, start: int | None = None, choice: int = 0
    ) -> Turn:
        """Take one answer in.

        Args:
            prompt: the token ids that were sent.
            answer: the parsed body, or the stream as far as it came; its choice must carry
                `token_ids` (ask with return_token_ids).
            start: the `routed_experts_prompt_start` that was sent; default: what the answer says.
            choice: which choice to follow.

        Raises:
            RoutesError: the rows leave a gap, belong to other tokens, or do not fit.
        """
        prompt = [int(token) for token in prompt]
        if isinstance(answer, StreamedAnswer):
            answer = answer.answer(cut=True)
        routes = decode_choice(
            answer,
            choice,
            num_prompt=len(prompt),
            start=start,
            shape=self.shape,
            request=self.name,
            files=self.files,
        )
        if routes.token_ids is None:
            raise RoutesError(
                f"{self.name}: expected token_ids in choice {choice}, got none: ask with "
                "return_token_ids true"
            )
        start, common = routes.count.start, common_prefix(self.tokens, prompt)
        if common < min(start, len(self.tokens)):  # rows before `start` would be of other tokens
            raise RoutesError(
                f"{self.name}: the prompt differs from the held tokens at position {common}, "
                f"before start {start}: send routed_experts_prompt_start={common}"
            )
        if routes.rows is not None:
            self.put(routes.rows, start=start, versions=routes.versions)
        else:
            self._keep(min(common, max(0, len(prompt) - 1)))
        self.tokens = prompt + list(routes.token_ids)
        rows = 0 if routes.rows is None else len(routes.rows)
        turn = Turn(start, rows, routes.count.num_generated, routes.finish_reason, routes.note)
        self.turns.append(turn)
        return turn

    def put(
        self, rows: np.ndarray, *, start: int, versions: Sequence[str | None] | None = None
    ) -> None:
        """Put rows of tokens [start, start + len(rows)) in, replacing held rows from `start` on.

        Raises:
            RoutesError: `start` lies past the held rows, or the rows have other sides than those.
        """
        held = self.num_rows
        if not 0 <= start <= held:
            raise RoutesError(
                f"{self.name}: {held} rows are held, so the next ones must start in [0, {held}], "
                f"got {start}: send routed_experts_prompt_start={held}"
            )
        versions = [None] * len(rows) if versions is None else versions
        if len(versions) != len(rows):
            raise RoutesError(f"{self.name}: expected {len(rows)} versions, got {len(versions)}")
        if len(rows):
            found = RouteShape(num_layers=rows.shape[1], top_k=rows.shape[2])
            self.shape = self.shape.joined(found, self.name)
        self._keep(start)
        if len(rows):
            self._rows = np.concatenate([self._rows, rows]) if start else rows
            self.versions.extend(versions)

    def truncate(self, num_tokens: int) -> None:
        """Drop everything after the first `num_tokens` tokens (a cut response)."""
        if not 0 <= num_tokens <= len(self.tokens):
            raise RoutesError(
                f"{self.name}: expected to keep [0, {len(self.tokens)}] tokens, got {num_tokens}"
            )
        self.tokens = self.tokens[:num_tokens]
        self._keep(max(0, num_tokens - 1))

    def finish(self, tokens: Sequence[int] | None = None) -> np.ndarray:
        """Return the rows as one array (len(tokens) - 1, L, K).

        Args:
            tokens: the trainer's own token ids, to be held against those of the rollout.

        Raises:
            RoutesError: tokens differ, or rows are missing.
        """
        if tokens is not None and [int(token) for token in tokens] != self.tokens:
            raise RoutesError(
                f"{self.name}: expected the rollout's {len(self.tokens)} tokens, got {len(tokens)} "
                f"that differ from position {common_prefix(self.tokens, tokens)}"
            )
        if self.missing_rows:
            note = f" ({self.turns[-1].note})" if self.turns and self.turns[-1].note else ""
            raise RoutesError(
                f"{self.name}: expected {max(0, len(self.tokens) - 1)} rows for "
                f"{len(self.tokens)} tokens, got {self.num_rows}{note}: resume from start "
                f"{self.next_start}, or truncate"
            )
        return self._rows

    def _keep(self, rows: int) -> None:
        self._rows, self.versions = self._rows[:rows], self.versions[:rows]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences share from the first one on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
