"""Check a running server against the contract: every endpoint, warm equals cold, values.

Every check runs; one that fails says what was expected and found, and the list of what the contract
promises and the server lacks ends the report. A server may answer HTTP 200 with rows of the right
shape that are all zeros: that is what this is for. It imports numpy and the standard library.
"""

from __future__ import annotations

import reprlib
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_r3.checks.connect import CHAT, COMPLETIONS, GENERATE, INFO, TEXT, Connection, connect
from vllm_r3.checks.rows import compare_rows, find_problems
from vllm_r3.client import StreamedAnswer
from vllm_r3.client.npy import decode_segment
from vllm_r3.errors import R3Error

ABORT = "/inference/v1/abort_requests"
LONGEST = 2000  # tokens of the request that is aborted
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
        """Return the names of the checks with this outcome."""
        return [result.name for result in self.results if result.outcome == outcome]

    @property
    def passed(self) -> bool:
        """Return whether every check was made and passed."""
        return len(self.names("ok")) == len(self.results)

    def lines(self) -> list[str]:
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
    first: Any = None
    rows: np.ndarray | None = None
    real: bool = False

    def ask(self, tokens: list[int] | None = None, **more: Any) -> Any:
        """Send the prompt, or other tokens, to the generate endpoint; return the answer."""
        return self.server.generate(tokens or self.tokens, self.max_tokens, **more).good()

    def read(self, answer: Any, start: int | None = None, prompt: int | None = None) -> np.ndarray:
        """Decode an answer to the prompt and return its rows."""
        routes = self.server.decode(answer, prompt or len(self.tokens), start=start)
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


CHECKS: dict[str, Callable[[Facts], None]] = {}


def _check(name: str) -> Callable[[Callable[[Facts], None]], None]:
    return lambda check: CHECKS.update({name: check})


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
    results = [_outcome(name, check, facts) for name, check in CHECKS.items()]
    return ServerReport(server.url, server.version, results)


def _outcome(name: str, check: Callable[[Facts], None], facts: Facts) -> Result:
    try:
        check(facts)
    except R3Error as error:
        outcome = "not checked" if isinstance(error, NotChecked) else "FAILED"
        return Result(name, outcome, str(error))
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
            _hold_npy(value, WIRE_DTYPES.get(dtype, "|u1 or <i2"), where)
        elif not isinstance(value, list):
            raise R3Error(f"{where}: expected nested lists, got {reprlib.repr(value)}")


def _hold_npy(text: Any, dtype: str, where: str) -> None:
    if not isinstance(text, str) or not text.startswith(NPY_1_0):
        raise R3Error(f"{where}: expected base64 of npy format 1.0, got {reprlib.repr(text)}")
    rows = decode_segment(text, where)
    order = "C" if rows.flags.c_contiguous else "Fortran"
    if rows.dtype.str != dtype or rows.ndim != 3 or order != "C":
        raise R3Error(
            f"{where}: expected {dtype} (rows, L, K) in C order, got {rows.dtype.str} "
            f"{rows.shape} in {order} order"
        )


@_check(f"GET {INFO}")
def _info(facts: Facts) -> None:
    info = facts.server.ask(INFO).good()
    if info.get("enabled") is False:
        raise R3Error("enabled is false: start the server with --enable-return-routed-experts")
    lacking = ", ".join(name for name in INFO_FIELDS if name not in info)
    if lacking:
        raise R3Error(f"expected the fields {', '.join(INFO_FIELDS)}, got none of {lacking}")


@_check(f"rows from {GENERATE}")
def _generate(facts: Facts) -> None:
    facts.first = facts.ask()
    facts.rows = facts.read(facts.first)


@_check("row values: different experts in every MoE layer")
def _values(facts: Facts) -> None:
    problems = find_problems(facts.cold(), facts.server.shape)
    if problems:
        raise R3Error("\n".join(f"{kind}: {what}" for kind, what in problems.items()))
    facts.real = True


@_check("routed_experts_meta")
def _meta(facts: Facts) -> None:
    facts.cold()
    if not isinstance(facts.first.get("routed_experts_meta"), dict):
        raise R3Error("expected routed_experts_meta beside the rows, got none")
    hold_meta(facts.first, facts.server.info)


@_check("warm equals cold")
def _warm(facts: Facts) -> None:
    cold = facts.cold()
    if not facts.real:
        raise NotChecked("the first answer's rows are not real ones")
    facts.same(facts.read(facts.ask()), cold, "the second answer")


@_check(f"rows from {COMPLETIONS}")
def _completions(facts: Facts) -> None:
    cold = facts.cold()
    reply = facts.server.openai(COMPLETIONS, facts.max_tokens, prompt=facts.tokens)
    facts.same(facts.read(reply.good()), cold, COMPLETIONS)


@_check(f"rows from {CHAT}")
def _chat(facts: Facts) -> None:
    facts.cold()
    messages = [{"role": "user", "content": TEXT}]
    answer = facts.server.openai(CHAT, facts.max_tokens, messages=messages).good()
    prompt = answer.get("prompt_token_ids") or []
    rows, again = (facts.read(part, prompt=len(prompt)) for part in (answer, facts.ask(prompt)))
    facts.same(rows, again, CHAT)


@_check("routed_experts_prompt_start")
def _start(facts: Facts) -> None:
    cold, length = facts.cold(), len(facts.tokens)
    for start in (1, length - 1, length):
        answer = facts.ask(routed_experts_prompt_start=start)
        facts.same(facts.read(answer, start), cold[start:], f"start {start}")


@_check("routed_experts_prompt_start past the prompt is refused")
def _bad_start(facts: Facts) -> None:
    start = len(facts.tokens) + 1
    body = {"routed_experts_prompt_start": start}
    reply = facts.server.generate(facts.tokens, facts.max_tokens, **body)
    if reply.status != 400:
        why = reply.why()
        raise R3Error(f"expected HTTP 400 for start {start} of {start - 1} tokens, got {why}")


@_check("return_routed_experts false")
def _off(facts: Facts) -> None:
    answer = facts.ask(return_routed_experts=False)
    if answer["choices"][0].get("routed_experts") is not None:
        raise R3Error("expected an answer without rows, got rows")


@_check("weight versions")
def _versions(facts: Facts) -> None:
    facts.cold()
    versions = facts.server.decode(facts.first, len(facts.tokens)).versions
    runs = (facts.first.get("routed_experts_meta") or {}).get("weight_versions")
    if versions is None or runs is None or "weight_version" not in facts.first:
        raise R3Error("expected weight_version and weight_versions beside the rows, got none")


@_check(f"POST {ABORT}")
def _abort(facts: Facts) -> None:
    facts.cold()
    name = f"verify-{secrets.token_hex(8)}"
    longest = min(LONGEST, (facts.server.max_len or LONGEST) - len(facts.tokens))
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(facts.server.generate, facts.tokens, longest, request_id=name)
        ended = 0
        while not ended and not job.done():
            ended = facts.server.ask(ABORT, {"request_ids": [name]}).good().get("aborted")
            time.sleep(0.01)
        answer = job.result().good()
    routes = facts.server.decode(answer, len(facts.tokens))
    if not ended or routes.finish_reason != "abort":
        raise R3Error(f"expected a request ended by its id, got {routes.finish_reason}")


@_check("routed_experts_encoding file")
def _file(facts: Facts) -> None:
    cold = facts.cold()
    ours = {"routed_experts_encoding": "file"}
    reply = facts.server.generate(facts.tokens, facts.max_tokens, **ours)
    if reply.status == 400 and "--routed-experts-dir" in reply.why():
        return  # a server without the flag
    answer = reply.good()
    field = answer["choices"][0].get("routed_experts")
    if not isinstance(field, dict):
        raise R3Error(f"expected the name of a file, got {reprlib.repr(field)}")
    facts.same(facts.read(answer), cold, "encoding file")


@_check("routed_experts_encoding and routed_experts_layout")
def _forms(facts: Facts) -> None:
    cold = facts.cold()
    for encoding in ("npy", "list"):
        for layout in ("split", "full"):
            answer = facts.ask(routed_experts_encoding=encoding, routed_experts_layout=layout)
            facts.same(facts.read(answer), cold, f"{encoding} {layout}")
            hold_form(answer, encoding, layout, str(cold.dtype))


@_check("routed_experts_stream delta")
def _delta(facts: Facts) -> None:
    cold, stream = facts.cold(), StreamedAnswer()
    body = facts.server.body(facts.tokens, facts.max_tokens, routed_experts_stream="delta")
    for at, chunk in enumerate(facts.server.stream(GENERATE, body), 1):
        stream.add(chunk)
        if any(choice.get("token_ids") for choice in chunk.get("choices") or []):
            rows = facts.read(stream.answer(cut=True))
            facts.same(rows, cold[: len(rows)], f"delta, chunk {at}")
    facts.same(facts.read(stream.answer()), cold, "delta")
