"""Check a running server against the contract: every endpoint, warm equals cold, values.

Every check runs; one that fails says what was expected and found, and the list of what the contract
promises and the server lacks ends the report. A server may answer HTTP 200 with rows of the right
shape that are all zeros: that is what this is for. It imports numpy and the standard library.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_r3.checks.connect import CHAT, COMPLETIONS, INFO, TEXT, Connection, Reply, connect
from vllm_r3.checks.rows import compare_rows, find_problems
from vllm_r3.client.npy import decode_segment
from vllm_r3.errors import R3Error

META_FIELDS = ("num_layers", "moe_layers", "num_experts", "top_k", "dtype", "encoding", "layout")
INFO_FIELDS = ("enabled", *META_FIELDS, "version")
NPY_1_0 = "k05VTVBZAQ"  # how base64 of an npy blob of format 1.0 begins
WIRE_DTYPES = {"uint8": "|u1", "int16": "<i2"}


class NotChecked(R3Error):
    """A check that could say nothing, because an earlier one failed; never a pass."""


@dataclass(frozen=True)
class Result:
    """One check's outcome: `ok`, `FAILED` or `not checked`, and why."""

    name: str
    outcome: str = "ok"
    problem: str = ""


@dataclass(frozen=True)
class ServerReport:
    """The outcome of every check, in order."""

    url: str
    version: str
    results: list[Result]

    def names(self, outcome: str) -> list[str]:
        """Names of the checks with this outcome."""
        return [result.name for result in self.results if result.outcome == outcome]

    @property
    def passed(self) -> bool:
        """Return whether every check was made and passed."""
        return len(self.names("ok")) == len(self.results)

    def lines(self) -> list[str]:
        """The report as text."""
        text = [f"{self.url}: vLLM {self.version}"]
        for result in self.results:
            text.append(f"  {result.outcome:<11} {result.name}")
            text += [f"{'':14}{line}" for line in result.problem.splitlines()]
        if self.names("FAILED"):
            text += ["missing from the contract:", *(f"  {name}" for name in self.names("FAILED"))]
        sums = [f"{len(self.names(what))} {what}" for what in ("ok", "FAILED", "not checked")]
        return [*text, f"{len(self.results)} checks: {', '.join(sums)}"]


@dataclass
class Facts:
    """What earlier checks learned: the prompt, its first answer and its rows."""

    server: Connection
    tokens: list[int]
    max_tokens: int
    max_differing: float
    first: Reply | None = None
    rows: np.ndarray | None = None
    real: bool = False

    def ask(self, tokens: list[int] | None = None, **more: Any) -> Reply:
        """Send the prompt, or other tokens, to the generate endpoint."""
        return self.server.generate(tokens or self.tokens, self.max_tokens, **more)

    def read(self, reply: Reply, start: int | None = None, prompt: int | None = None) -> np.ndarray:
        """Decode a reply to the prompt and return its rows."""
        routes = self.server.routes(reply, prompt or len(self.tokens), start=start)
        if routes.rows is None:
            raise R3Error(routes.note)
        return routes.rows

    def cold(self) -> np.ndarray:
        """Return the rows of the first answer, needed by most checks."""
        if self.rows is None:
            raise NotChecked("the first answer had no rows to compare with")
        return self.rows

    def same(self, found: np.ndarray, expected: np.ndarray, what: str) -> None:
        """Refuse rows that are impossible or not those of another answer."""
        compare_rows(found, expected, self.server.shape, what, max_differing=self.max_differing)


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
        max_differing: share of MoE cells (row, layer) that may differ between two answers. 0 is
            right for float32; low precision may flip a tie where the tail is computed again.
        timeout: seconds for one request.

    Raises:
        R3Error: nothing answers there, or SGLang does, which has a contract of its own.
    """
    server = connect(url, timeout)
    if server.kind == "sglang":
        raise R3Error(f"{url}: expected a vLLM server, got SGLang {server.version}: use compare")
    facts = Facts(server, server.prompt(prompt_tokens, max_tokens), max_tokens, max_differing)
    results = [_outcome(name, check, facts) for name, check in CHECKS]
    return ServerReport(server.url, server.version, results)


def _outcome(name: str, check: Callable[[Facts], None], facts: Facts) -> Result:
    try:
        check(facts)
    except NotChecked as error:
        return Result(name, "not checked", str(error))
    except R3Error as error:
        return Result(name, "FAILED", str(error))
    return Result(name)


def hold_meta(answer: Mapping[str, Any], info: Mapping[str, Any], start: int = 0) -> None:
    """Refuse an answer whose `routed_experts_meta` is not what `/routed_experts/info` said."""
    meta = answer.get("routed_experts_meta") or {}
    expected = {"start": start} | {name: info[name] for name in META_FIELDS if name in info}
    found = {name: meta.get(name) for name in expected}
    if found != expected:
        raise R3Error(f"routed_experts_meta: expected {expected}, got {found}")


def hold_form(answer: Mapping[str, Any], encoding: str, layout: str, dtype: str) -> None:
    """Refuse rows in another form than the promised one, even those that the client would read."""
    parts = enumerate(answer["choices"])
    fields = {f"choices[{at}].routed_experts": part.get("routed_experts") for at, part in parts}
    prompt = answer.get("prompt_routed_experts")
    if layout == "split":
        fields["prompt_routed_experts"] = prompt
    elif prompt is not None:
        raise R3Error("prompt_routed_experts: expected none in layout full, got one")
    for where, value in fields.items():
        if encoding == "npy":
            _check_npy(value, dtype, where)
        elif not isinstance(value, list):
            raise R3Error(f"{where}: expected nested lists, got {reprlib.repr(value)}")


def _check_npy(text: Any, dtype: str, where: str) -> None:
    if not isinstance(text, str) or not text.startswith(NPY_1_0):
        raise R3Error(f"{where}: expected base64 of npy format 1.0, got {reprlib.repr(text)}")
    rows = decode_segment(text, where)
    if rows.dtype.str != WIRE_DTYPES.get(dtype) or rows.ndim != 3 or not rows.flags.c_contiguous:
        raise R3Error(
            f"{where}: expected {WIRE_DTYPES.get(dtype)} (rows, L, K) in C order, got "
            f"{rows.dtype.str} {rows.shape}{'' if rows.flags.c_contiguous else ' in another'}"
        )


def check_info(facts: Facts) -> None:
    reply = facts.server.get(INFO)
    if reply.status != 200 or not isinstance(reply.body, dict):
        raise R3Error(f"expected HTTP 200 and a JSON object, got {reply.why()}")
    if reply.body.get("enabled") is False:
        raise R3Error("enabled is false: start the server with --enable-return-routed-experts")
    lacking = ", ".join(name for name in INFO_FIELDS if name not in reply.body)
    if lacking:
        raise R3Error(f"expected the fields {', '.join(INFO_FIELDS)}, got none of {lacking}")


def check_generate(facts: Facts) -> None:
    facts.first = facts.ask()
    facts.rows = facts.read(facts.first)


def check_values(facts: Facts) -> None:
    problems = find_problems(facts.cold(), facts.server.shape)
    if problems:
        raise R3Error("\n".join(f"{kind}: {what}" for kind, what in problems.items()))
    facts.real = True


def check_meta(facts: Facts) -> None:
    facts.cold()
    if not isinstance(facts.first.body.get("routed_experts_meta"), dict):
        raise R3Error("expected routed_experts_meta beside the rows, got none")
    hold_meta(facts.first.body, facts.server.info)


def check_warm(facts: Facts) -> None:
    cold = facts.cold()
    if not facts.real:
        raise NotChecked("the first answer's rows are not real ones")
    facts.same(facts.read(facts.ask()), cold, "the second answer")


def check_completions(facts: Facts) -> None:
    cold = facts.cold()
    reply = facts.server.openai(COMPLETIONS, facts.max_tokens, prompt=facts.tokens)
    facts.same(facts.read(reply), cold, COMPLETIONS)


def check_chat(facts: Facts) -> None:
    facts.cold()
    messages = [{"role": "user", "content": TEXT}]
    reply = facts.server.openai(CHAT, facts.max_tokens, messages=messages)
    if reply.status != 200:
        raise R3Error(f"expected HTTP 200, got {reply.why()}")
    prompt = reply.body.get("prompt_token_ids") or []
    rows, again = (facts.read(r, prompt=len(prompt)) for r in (reply, facts.ask(prompt)))
    facts.same(rows, again, CHAT)


def check_start(facts: Facts) -> None:
    cold, length = facts.cold(), len(facts.tokens)
    for start in (1, length - 1, length):
        reply = facts.ask(routed_experts_prompt_start=start)
        facts.same(facts.read(reply, start), cold[start:], f"start {start}")


def check_bad_start(facts: Facts) -> None:
    start = len(facts.tokens) + 1
    reply = facts.ask(routed_experts_prompt_start=start)
    if reply.status != 400:
        raise R3Error(
            f"expected HTTP 400 for start {start} of {start - 1} tokens, got {reply.why()}"
        )


def check_off(facts: Facts) -> None:
    reply = facts.ask(return_routed_experts=False)
    if reply.status != 200:
        raise R3Error(f"expected HTTP 200, got {reply.why()}")
    if reply.body["choices"][0].get("routed_experts") is not None:
        raise R3Error("expected an answer without rows, got rows")


def check_forms(facts: Facts) -> None:
    cold = facts.cold()
    for encoding in ("npy", "list"):
        for layout in ("split", "full"):
            reply = facts.ask(routed_experts_encoding=encoding, routed_experts_layout=layout)
            facts.same(facts.read(reply), cold, f"{encoding} {layout}")
            hold_form(reply.body, encoding, layout, str(cold.dtype))


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
