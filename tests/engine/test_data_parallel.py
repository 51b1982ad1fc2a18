"""Two data-parallel ranks, with expert parallelism and sequence-parallel MoE: rows by value.

Both orders of work are run, by vLLM's own layers. In the "logits" cases dispatch comes first: each
rank routes the batch of all ranks, and capture must take its own tokens out of it. In the "ids"
cases, as on CUDA by default, each rank routes its own tokens and dispatches what it chose.
data_parallel_worker.py has what the CPU build lacks. A server of two API processes comes last.
"""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from cpu_platform import ENV
from data_parallel_engines import CASES, MAX_TOKENS, PROMPTS, RANKS, TURNS, run_case
from forked import Forked
from oracle_checks import check_greedy, check_rows
from pool import count_start
from server_fixture import (
    API_KEY,
    ENDPOINTS,
    GENERATE,
    Answer,
    Kit,
    read_answer,
    request,
    seeded_prompt,
    wait_for,
)

LIMIT = 300  # seconds for one engine
NUM_ASKED = 16  # of the server, in a round
ROUNDS = 10
KEYS = [f"{turn}{i}" for turn in TURNS for i in range(len(PROMPTS))]


class Run(NamedTuple):
    """What one case returned, what its counters say and what its ranks saw."""

    name: str
    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]
    notes: list[dict[str, Any]]

    def noted(self, what: str) -> list[dict[str, Any]]:
        """All notes of one kind."""
        return [note for note in self.notes if note["what"] == what]


@pytest.fixture(scope="module", params=CASES)
def run(request, models, tmp_path_factory) -> Run:
    """One case, run by a process of its own."""
    name, out = request.param, tmp_path_factory.mktemp("data-parallel")
    model, log = models(CASES[name].kind), out / "log"
    with count_start(name):
        process = Forked(run_case, model, out, name, log_path=log, env=os.environ | ENV)
        try:
            ended = process.wait(LIMIT)
        finally:
            with suppress(ProcessLookupError):  # nothing is left when all went well
                os.killpg(process.pid, signal.SIGKILL)
    assert ended == 0, f"exit {ended}:\n{log.read_text(errors='replace')[-6000:]}"
    notes = (out / f"{name}.notes").read_text().splitlines()
    return Run(
        name=name,
        arrays=dict(np.load(out / f"{name}.npz")),
        facts=json.loads((out / f"{name}.json").read_text()),
        notes=[json.loads(line) for line in notes],
    )


def test_rows_equal_the_oracle(run, oracles):
    oracle, found = oracles(CASES[run.name].kind), run.arrays
    for key in KEYS:
        tokens = found["tokens-" + key].tolist()
        truth = oracle.truth(tokens)
        num_prompt_tokens = len(tokens) - MAX_TOKENS
        check_greedy(truth, tokens, num_prompt_tokens, key)
        rows = found["prompt-" + key], found["rows-" + key]
        check_rows(oracle, truth, num_prompt_tokens, *rows, where=f"{run.name} {key}")


def test_each_rank_answered_its_requests_and_has_a_prefix_cache_of_its_own(run):
    facts, arrays = run.facts, run.arrays
    cold_and_warm, swapped = 2, 1
    assert facts["answered"] == {
        str(rank): cold_and_warm * RANKS.count(rank) + swapped * RANKS.count(1 - rank)
        for rank in range(2)
    }
    assert facts["invalid"] == {"0": 0, "1": 0}
    for rank in range(2):
        mine = [i for i, of_rank in enumerate(RANKS) if of_rank == rank]
        assert sum(int(arrays[f"cached-warm{i}"]) for i in mine) > 0
        assert all(int(arrays[f"cached-swapped{i}"]) == 0 for i in mine)


def test_the_case_ran_as_it_is_named(run):
    """Who routed whose tokens; batches that differ in size either way; ranks without requests."""
    name = run.name
    num_ranks = 4 if "-tp-" in name else 2
    assert run.facts["sequence_parallel"] == ("-tp-" in name)
    kind = "dispatched " + name.split("-")[0]
    sizes = [note["sizes"] for note in run.noted(kind)]
    assert {note["rank"] for note in run.noted(kind)} == set(range(num_ranks))
    assert {note["what"] for note in run.notes if "dispatched" in note["what"]} == {kind}
    assert {len(s) for s in sizes} == {num_ranks}
    assert any(1 < s[0] < s[-1] for s in sizes) and any(s[0] > s[-1] > 1 for s in sizes)
    assert {note["rank"] for note in run.noted("dummy batch")} == set(range(num_ranks))
    routed = [note["in_place"] for note in run.noted("routed")]
    # grouped top-k, as glm4 has it, is no kernel that writes to memory of the caller's choice
    in_place = CASES[name].modular and CASES[name].kind != "glm4"
    assert routed == ([True] * num_ranks if in_place else [])


def answered(kit: Kit) -> dict[str, int]:
    """Requests answered, by rank."""
    found: dict[str, int] = {}
    for line in kit.client.get("/metrics").text.splitlines():
        if line.startswith("vllm:request_success_total{"):
            rank = line.split('engine="')[1].split('"')[0]
            found[rank] = found.get(rank, 0) + int(float(line.split()[-1]))
    return found


def ask(kit: Kit, i: int) -> tuple[Answer, list[int]]:
    """Send request i on a connection of its own; half of them name their rank."""
    prompt = seeded_prompt(i // 2, 5 + 13 * (i // 2))
    endpoint, rank = ("completions", i // 2 % 2) if i % 2 else ("generate", None)
    headers = {"Authorization": f"Bearer {API_KEY}"}
    headers |= {} if rank is None else {"X-data-parallel-rank": str(rank)}
    url, body = kit.url + ENDPOINTS[endpoint], request(endpoint, prompt)
    answer = httpx.post(url, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return read_answer(answer.json()), prompt


def api_processes(kit: Kit) -> set[int]:
    """Numbers of the API processes that have answered requests, by the log."""
    log = kit.server.log_path.read_text(errors="replace")
    found = re.findall(r"ApiServer_(\d+) .* \"POST /\S+ HTTP/1.1\" 200", log)
    return {int(number) for number in found}


def test_rows_of_a_server_with_two_ranks_and_two_api_processes_equal_the_oracle(two_ranks):
    answers: list[tuple[Answer, list[int]]] = []
    with ThreadPoolExecutor(6) as pool:
        for _ in range(ROUNDS):  # the kernel picks the process that accepts a connection
            answers += pool.map(lambda i: ask(two_ranks, i), range(NUM_ASKED))
            if len(api_processes(two_ranks)) == 2:
                break
    for answer, prompt in answers:
        two_ranks.check_choice(answer, answer.choices[0], prompt, f"prompt of {len(prompt)}")
    counted = answered(two_ranks)
    assert sum(counted.values()) == len(answers), counted
    assert min(counted["0"], counted["1"]) >= len(answers) // 4, counted
    assert api_processes(two_ranks) == {0, 1}


def test_requests_of_either_api_process_are_aborted_by_id(two_ranks):
    """Each on a connection of its own, so that the kernel spreads them over the processes."""
    body = request("generate", seeded_prompt(3, 20), max_tokens=900, ignore_eos=True)

    def ask_named(i: int) -> Answer:
        headers = {"X-Request-Id": f"long-{i}"}
        answer = httpx.post(two_ranks.url + GENERATE, json=body, headers=headers, timeout=120)
        return read_answer(answer.json())

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(ask_named, i) for i in range(8)]
        wait_for(lambda: two_ranks.metric("num_requests_running") == 8, "all of them")
        names = {"request_ids": [f"long-{i}" for i in range(8)]}
        status, told = two_ranks.post("/inference/v1/abort_requests", names)
        answers = [job.result() for job in jobs]
    assert (status, told) == (200, {"status": "aborted", "aborted": 8})
    for answer in answers:
        choice = answer.choices[0]
        assert choice.finish_reason == "abort"
        if choice.tokens:  # else it ended before the first
            two_ranks.check_choice(answer, choice, body["token_ids"], "aborted")
