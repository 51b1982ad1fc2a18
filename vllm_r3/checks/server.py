"""Check a running server against the contract: every endpoint, warm equals cold, values.

Every check runs; one that fails says what was expected and found, and the list of what the contract
promises and the server lacks ends the report. A server may answer HTTP 200 with rows of the right
shape that are all zeros: that is what this is for. It imports numpy and the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vllm_r3.checks.connect import TEXT, Reply
from vllm_r3.checks.target import INFO, Target, connect
from vllm_r3.checks.values import find_problems
from vllm_r3.client import RouteShape
from vllm_r3.errors import R3Error

INFO_FIELDS = (
    "enabled",
    "num_layers",
    "moe_layers",
    "num_experts",
    "top_k",
    "dtype",
    "encoding",
    "layout",
    "version",
)


class NotChecked(R3Error):
    """A check that could say nothing, because an earlier one failed; never a pass."""


@dataclass(frozen=True)
class Result:
    """One check's outcome: `ok`, `FAILED` or `not checked`, and why."""

    name: str
    outcome: str = "ok"
    problem: str = ""


@dataclass
class ServerReport:
    """The outcome of every check, in order."""

    url: str
    version: str
    results: list[Result] = field(default_factory=list)

    def names(self, outcome: str) -> list[str]:
        """Names of the checks with this outcome."""
        return [result.name for result in self.results if result.outcome == outcome]

    @property
    def passed(self) -> bool:
        """Every check was made and passed."""
        return len(self.names("ok")) == len(self.results)

    def lines(self) -> list[str]:
        """The report as text."""
        text = [f"{self.url}: vLLM {self.version}"]
        for result in self.results:
            text.append(f"  {result.outcome:<11} {result.name}")
            text += [f"{'':14}{line}" for line in result.problem.splitlines()]
        if self.names("FAILED"):
            text += ["missing from the contract:", *(f"  {name}" for name in self.names("FAILED"))]
        sums = [
            f"{len(self.names(outcome))} {outcome}" for outcome in ("ok", "FAILED", "not checked")
        ]
        text.append(f"{len(self.results)} checks: {', '.join(sums)}")
        return text


@dataclass
class Facts:
    """What earlier checks learned: the prompt, its first answer and its rows."""

    target: Target
    tokens: list[int]
    max_tokens: int
    max_differing: float
    first: Reply | None = None
    rows: np.ndarray | None = None
    real: bool = False
    shape: RouteShape = RouteShape()

    def read(self, reply: Reply, start: int | None = None, prompt: int | None = None) -> np.ndarray:
        """Decode a reply to the prompt and return its rows."""
        if (
            reply.status == 200
            and isinstance(reply.body, dict)
            and reply.body.get("prompt_token_ids")
        ):
            prompt = len(reply.body["prompt_token_ids"])
        length = len(self.tokens) if prompt is None else prompt
        routes = self.target.routes(reply, length, self.shape, start=start)
        if routes.rows is None:
            raise R3Error(routes.note)
        return routes.rows

    def cold(self) -> np.ndarray:
        """The rows of the first answer, needed by most checks."""
        if self.rows is None:
            raise NotChecked("the first answer had no rows to compare with")
        return self.rows

    def judge(self, rows: np.ndarray) -> None:
        """Refuse rows that no router can have chosen."""
        problems = find_problems(rows, self.shape)
        if problems:
            raise R3Error("\n".join(map(str, problems)))


def verify_server(
    url: str,
    *,
    prompt_tokens: int = 300,
    max_tokens: int = 8,
    max_differing: float = 0.0,
    timeout: float = 600.0,
) -> ServerReport:
    """Run every check against a server.

    Args:
        url: its address.
        prompt_tokens: length of the prompt; more than two KV blocks, or "warm" tests nothing.
        max_tokens: tokens to generate with each request.
        max_differing: share of (row, layer) cells that may differ between a cold and a warm answer.
            0 is right for float32; low precision may flip a tie where the tail is computed again.
        timeout: seconds for one request.

    Raises:
        R3Error: nothing answers there, or SGLang does, which has a contract of its own.
    """
    target = connect(url, timeout)
    if target.kind == "sglang":
        raise R3Error(f"{url}: expected a vLLM server, got SGLang {target.version}: use compare")
    facts = Facts(target, target.prompt(prompt_tokens, max_tokens), max_tokens, max_differing)
    facts.shape = target.shape
    report = ServerReport(target.http.url, target.version)
    for name, check in CHECKS:
        report.results.append(_outcome(name, check, facts))
    return report


def _outcome(name: str, check: Callable[[Facts], None], facts: Facts) -> Result:
    try:
        check(facts)
    except NotChecked as error:
        return Result(name, "not checked", str(error))
    except R3Error as error:
        return Result(name, "FAILED", str(error))
    return Result(name)


def check_info(facts: Facts) -> None:
    reply = facts.target.http.get(INFO)
    if reply.status != 200 or not isinstance(reply.body, dict):
        raise R3Error(f"expected HTTP 200 and a JSON object, got {reply.why()}")
    if reply.body.get("enabled") is False:
        raise R3Error("enabled is false: start the server with --enable-return-routed-experts")
    lacking = [name for name in INFO_FIELDS if name not in reply.body]
    if lacking:
        raise R3Error(
            f"expected the fields {', '.join(INFO_FIELDS)}, got none of {', '.join(lacking)}"
        )


def check_generate(facts: Facts) -> None:
    facts.first = facts.target.generate(facts.tokens, facts.max_tokens)
    facts.rows = facts.read(facts.first)


def check_values(facts: Facts) -> None:
    facts.judge(facts.cold())
    facts.real = True


def check_meta(facts: Facts) -> None:
    facts.cold()
    meta = facts.first.body.get("routed_experts_meta") if facts.first else None
    if not isinstance(meta, dict):
        raise R3Error("expected routed_experts_meta beside the rows, got none")
    for name in ("num_layers", "moe_layers", "num_experts", "top_k", "dtype"):
        if meta.get(name) != facts.target.info.get(name):
            raise R3Error(
                f"expected {name} {facts.target.info.get(name)} as in {INFO}, got {meta.get(name)}"
            )


def check_warm(facts: Facts) -> None:
    cold = facts.cold()
    if not facts.real:
        raise NotChecked("the first answer's rows are not real ones")
    reply = facts.target.generate(facts.tokens, facts.max_tokens)
    _same(facts, cold, facts.read(reply), "the second answer")


def check_completions(facts: Facts) -> None:
    cold = facts.cold()
    reply = facts.target.complete(facts.tokens, facts.max_tokens)
    rows = facts.read(reply)
    facts.judge(rows)
    _same(facts, cold, rows, "/v1/completions")


def check_chat(facts: Facts) -> None:
    facts.cold()
    reply = facts.target.chat(TEXT, facts.max_tokens)
    if reply.status != 200:
        raise R3Error(f"expected HTTP 200, got {reply.why()}")
    prompt = reply.body.get("prompt_token_ids") or []
    rows = facts.read(reply, prompt=len(prompt))
    facts.judge(rows)
    again = facts.target.generate(prompt, facts.max_tokens)
    _same(
        facts,
        rows,
        facts.read(again, prompt=len(prompt)),
        "the generate endpoint on the same tokens",
    )


def check_start(facts: Facts) -> None:
    cold, length = facts.cold(), len(facts.tokens)
    for start in (1, length - 1, length):
        reply = facts.target.generate(
            facts.tokens, facts.max_tokens, routed_experts_prompt_start=start
        )
        _same(facts, cold[start:], facts.read(reply, start), f"start {start}")


def check_bad_start(facts: Facts) -> None:
    start = len(facts.tokens) + 1
    reply = facts.target.generate(facts.tokens, facts.max_tokens, routed_experts_prompt_start=start)
    if reply.status != 400:
        raise R3Error(
            f"expected HTTP 400 for start {start} of {len(facts.tokens)} tokens, got {reply.why()}"
        )


def check_off(facts: Facts) -> None:
    reply = facts.target.generate(facts.tokens, facts.max_tokens, return_routed_experts=False)
    choice = reply.body["choices"][0] if reply.status == 200 else {}
    if reply.status != 200 or choice.get("routed_experts") is not None:
        got = "rows" if reply.status == 200 else reply.why()
        raise R3Error(f"expected an answer without rows, got {got}")


def check_forms(facts: Facts) -> None:
    cold = facts.cold()
    for encoding in ("npy", "list"):
        for layout in ("split", "full"):
            asked = {"routed_experts_encoding": encoding, "routed_experts_layout": layout}
            reply = facts.target.generate(facts.tokens, facts.max_tokens, **asked)
            _same(facts, cold, facts.read(reply), f"{encoding} {layout}")
            _has_form(reply, encoding, layout)


def _has_form(reply: Reply, encoding: str, layout: str) -> None:
    rows = reply.body["choices"][0]["routed_experts"]
    found = "npy" if isinstance(rows, str) else "list"
    split = reply.body.get("prompt_routed_experts") is not None
    if found != encoding or split != (layout == "split"):
        raise R3Error(f"expected {encoding} {layout}, got {found} {'split' if split else 'full'}")


def _same(facts: Facts, cold: np.ndarray, warm: np.ndarray, what: str) -> None:
    """Compare rows as sets of experts a cell."""
    if cold.shape != warm.shape:
        raise R3Error(f"{what}: expected rows {cold.shape}, got {warm.shape}")
    differ = (np.sort(cold, axis=2) != np.sort(warm, axis=2)).any(axis=2)
    if differ.size and differ.mean() > facts.max_differing:
        row, layer = (int(n) for n in np.argwhere(differ)[0])
        raise R3Error(
            f"{what}: expected the first answer's rows, got {int(differ.sum())} of {differ.size} "
            "cells "
            f"different, the first at row {row}, layer {layer}: {cold[row, layer].tolist()} became "
            f"{warm[row, layer].tolist()}"
        )


CHECKS: list[tuple[str, Callable[[Facts], None]]] = [
    (f"GET {INFO}", check_info),
    ("rows from /inference/v1/generate", check_generate),
    ("row values: different experts in every MoE layer", check_values),
    ("routed_experts_meta", check_meta),
    ("warm equals cold", check_warm),
    ("rows from /v1/completions", check_completions),
    ("rows from /v1/chat/completions", check_chat),
    ("routed_experts_prompt_start", check_start),
    ("routed_experts_prompt_start past the prompt is refused", check_bad_start),
    ("return_routed_experts false", check_off),
    ("routed_experts_encoding and routed_experts_layout", check_forms),
]
