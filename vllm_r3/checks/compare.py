"""One prompt, two servers, side by side: shapes, dtypes, agreement per layer, the first difference.

Both answer the same token ids greedily; where their texts part, rows stop being comparable, so only
rows of the shared tokens count. It imports numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_r3.checks.connect import Connection, connect
from vllm_r3.checks.rows import differing_cells
from vllm_r3.client import ChoiceRoutes, RouteShape
from vllm_r3.client.npy import decode_segment
from vllm_r3.client.rollout import common_prefix
from vllm_r3.client.servers import read_answer
from vllm_r3.errors import R3Error


@dataclass(frozen=True)
class Side:
    """One server's half: what it is, its decoded answer, and what it sent on the wire."""

    server: Connection
    routes: ChoiceRoutes
    wire: str


@dataclass(frozen=True)
class Comparison:
    """Both halves and where they agree.

    Attributes:
        shared: rows compared, all of the prompt's and of the generated tokens that are the same.
        agreement: share of agreeing rows, one for each decoder layer.
        first: (row, layer) of the first difference, None where there is none.
    """

    sides: tuple[Side, Side]
    shared: int
    agreement: np.ndarray
    first: tuple[int, int] | None

    def passed(self, min_agreement: float) -> bool:
        """Return whether every layer agrees in at least this share of rows."""
        return bool((self.agreement >= min_agreement).all())

    def lines(self) -> list[str]:
        text = [
            f"{name}  {side.server.url}  {side.server.kind} {side.server.version}  "
            f"rows {side.routes.rows.shape} from {side.wire}"
            for name, side in zip("AB", self.sides, strict=True)
        ]
        prompt = self.sides[0].routes.count.num_prompt
        text += [f"{prompt} prompt tokens, {self.shared} rows compared", "layer  agreeing rows"]
        text += [f"{layer:5}  {share:8.2%}" for layer, share in enumerate(self.agreement)]
        if self.first is not None:
            row, layer = self.first
            a, b = (sorted(side.routes.rows[row, layer].tolist()) for side in self.sides)
            text.append(f"first difference at row {row}, layer {layer}: A {a}, B {b}")
        return text


def compare_servers(
    url_a: str,
    url_b: str,
    *,
    prompt_tokens: int = 64,
    max_tokens: int = 32,
    shape: RouteShape | None = None,
    timeout: float = 600.0,
) -> Comparison:
    """Ask both servers the same and compare their rows.

    Either is vLLM of any age with a generate endpoint, this project's, or SGLang; `shape` is for
    servers that do not say it.

    Raises:
        R3Error: a server does not answer, or the answers are of different models.
    """
    servers = [connect(url, timeout) for url in (url_a, url_b)]
    shape = shape or RouteShape()
    for server in servers:
        shape = shape.joined(server.shape, server.url)
    tokens = min((server.prompt(prompt_tokens, max_tokens) for server in servers), key=len)
    return compare_sides(*(_ask(server, tokens, max_tokens, shape) for server in servers))


def _ask(server: Connection, tokens: list[int], max_tokens: int, shape: RouteShape) -> Side:
    answer = server.generate(tokens, max_tokens).good()
    routes = server.decode(answer, len(tokens), shape=shape)
    if routes.rows is None or routes.token_ids is None:
        raise R3Error(f"{server.url}: {routes.note or 'expected token ids, got none'}")
    raw = read_answer(answer).choices[0]
    form = {str: "base64", dict: "file"}.get(type(raw.generated), "lists")
    dtype = getattr(decode_segment(raw.generated, "answer", server.files), "dtype", "")
    return Side(server, routes, f"{raw.layout or 'full'} {form} {dtype}".rstrip())


def compare_sides(first: Side, second: Side) -> Comparison:
    """Compare the rows of two answers to the same prompt."""
    a, b = first.routes.rows, second.routes.rows
    if a.shape[1:] != b.shape[1:]:
        raise R3Error(f"expected rows of one model, got A {a.shape} and B {b.shape}")
    same = common_prefix(first.routes.token_ids, second.routes.token_ids)
    # row i needs tokens 0..i only, so the rows up to the last shared token count
    shared = min(len(a), len(b), first.routes.count.num_prompt + same)
    differ = differing_cells(a[:shared], b[:shared])
    agreement = 1 - differ.mean(axis=0) if shared else np.ones(a.shape[1])
    first_at = tuple(int(n) for n in np.argwhere(differ)[0]) if differ.any() else None
    return Comparison((first, second), shared, agreement, first_at)
