"""One prompt, two servers, side by side: shapes, dtypes, agreement per layer, the first difference.

Both answer the same token ids greedily; where their texts part, rows stop being comparable, so only
rows of the shared tokens count. Cells are compared as sets of experts. It imports numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_r3.checks.target import Target, connect
from vllm_r3.client import ChoiceRoutes, RouteShape
from vllm_r3.client.npy import decode_segment
from vllm_r3.client.servers import read_answer
from vllm_r3.errors import R3Error


@dataclass(frozen=True)
class Side:
    """One server's half: what it is, its rows and tokens, and what it sent on the wire."""

    target: Target
    routes: ChoiceRoutes
    tokens: list[int]
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
    prompt: int
    shared: int
    agreement: np.ndarray
    first: tuple[int, int] | None

    def passed(self, min_agreement: float) -> bool:
        """Every layer agrees in at least this share of rows."""
        return bool((self.agreement >= min_agreement).all())

    def lines(self) -> list[str]:
        """The comparison as text."""
        text = []
        for name, side in zip("AB", self.sides, strict=True):
            rows = side.routes.rows
            text.append(
                f"{name}  {side.target.http.url}  {side.target.kind} {side.target.version}  "
                f"rows {rows.shape} from {side.wire}"
            )
        text.append(f"{self.prompt} prompt tokens, {self.shared} rows compared")
        text.append("layer  agreeing rows")
        text += [f"{layer:5}  {share:8.2%}" for layer, share in enumerate(self.agreement)]
        if self.first is not None:
            row, layer = self.first
            a, b = (np.sort(side.routes.rows[row, layer]).tolist() for side in self.sides)
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

    Args:
        url_a, url_b: vLLM of any age with a generate endpoint, this project's, or SGLang.
        shape: of the model, for a server that sends no shape; default: what either server says.

    Raises:
        R3Error: a server does not answer, or the answers are of different models.
    """
    targets = [connect(url, timeout) for url in (url_a, url_b)]
    shape = shape or RouteShape()
    for target in targets:
        shape = shape.joined(target.shape, target.http.url)
    tokens = min((target.prompt(prompt_tokens, max_tokens) for target in targets), key=len)
    first, second = (_ask(target, tokens, max_tokens, shape) for target in targets)
    return compare_sides(first, second, tokens)


def _ask(target: Target, tokens: list[int], max_tokens: int, shape: RouteShape) -> Side:
    reply = target.generate(tokens, max_tokens)
    routes = target.routes(reply, len(tokens), shape)
    if routes.rows is None:
        raise R3Error(f"{target.http.url}: {routes.note}")
    if routes.token_ids is None:
        raise R3Error(f"{target.http.url}: expected token ids in the answer, got none")
    return Side(target, routes, list(routes.token_ids), _wire(reply.body))


def _wire(body: object) -> str:
    raw = read_answer(body).choices[0]
    sent = decode_segment(raw.generated, "answer")
    form = "base64" if isinstance(raw.generated, str) else "lists"
    return f"{raw.layout or 'full'} {form} {'' if sent is None else sent.dtype}".rstrip()


def compare_sides(first: Side, second: Side, tokens: list[int]) -> Comparison:
    """Compare the rows of two answers to the same prompt."""
    a, b = first.routes.rows, second.routes.rows
    if a.shape[1:] != b.shape[1:]:
        raise R3Error(f"expected rows of one model, got A {a.shape} and B {b.shape}")
    same = next(
        (
            at
            for at, (one, two) in enumerate(zip(first.tokens, second.tokens, strict=False))
            if one != two
        ),
        min(len(first.tokens), len(second.tokens)),
    )
    # row i needs tokens 0..i only, so the rows up to the last shared token count
    shared = min(len(a), len(b), len(tokens) + same)
    equal = (np.sort(a[:shared], axis=2) == np.sort(b[:shared], axis=2)).all(axis=2)
    agreement = equal.mean(axis=0) if shared else np.ones(a.shape[1])
    first_at = None if equal.all() else tuple(int(n) for n in np.argwhere(~equal)[0])
    return Comparison((first, second), len(tokens), shared, agreement, first_at)
