"""Two data-parallel ranks, with expert parallelism and sequence-parallel MoE: rows by value.

Both orders of work are run, by vLLM's own layers. In the "logits" cases dispatch comes first: each
rank routes the batch of all ranks, and capture must take its own tokens out of it. In the "ids"
cases, as on CUDA by default, each rank routes its own tokens and dispatches what it chose. The
platform of data_parallel_platform.py adds what the CPU build lacks. One process runs all engines
(data_parallel_engines.py); a server of two API processes comes last.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from data_parallel_engines import CASES, MAX_TOKENS, PROMPTS, RANKS, TURNS
from data_parallel_notes import read_notes
from oracle_checks import check_greedy, check_rows
from platform_plugin import write_plugin
from server_fixture import ENDPOINTS, Answer, Kit, read_answer, request, seeded_prompt, serving

from vllm_r3.checks.rows import differing_cells

HERE = Path(__file__).resolve().parent
LIMIT = 600  # seconds for all engines
# by default two ranks want two NUMA nodes
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PARALLEL = [name for name, case in CASES.items() if case.options]
NUM_ASKED = 16  # of the server, in a round
ROUNDS = 10
KEYS = [f"{turn}{i}" for turn in TURNS for i in range(len(PROMPTS))]


class Run(NamedTuple):
    """What one case returned, what its counters say and what its ranks saw."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]
    notes: list[dict[str, Any]]

    def noted(self, what: str) -> list[dict[str, Any]]:
        """All notes of one kind."""
        return [note for note in self.notes if note["what"] == what]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Variables with which every new process finds the platform."""
    plugin = write_plugin(tmp_path_factory.mktemp("plugin"), "data_parallel_platform")
    before = os.environ.get("PYTHONPATH")
    path = [plugin, *([before] if before else [])]
    return ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="module")
def runs(models, environment, tmp_path_factory) -> dict[str, Run]:
    """All cases, run by a process of their own."""
    out = tmp_path_factory.mktemp("data-parallel")
    folder = {models(kind).parent for kind in ("moe", "dense-between", "glm4")}.pop()
    script = HERE / "data_parallel_engines.py"
    command = [sys.executable, str(script), str(folder), str(out)]
    with open(out / "log", "w") as log:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            ended: Any = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            ended = f"none after {LIMIT} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left when all went well
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert ended == 0, f"exit {ended}:\n{(out / 'log').read_text(errors='replace')[-6000:]}"
    return {name: read_run(out, name) for name in CASES}


def read_run(out: Path, name: str) -> Run:
    """What data_parallel_engines.py has written of one case."""
    notes = out / f"{name}.notes"
    return Run(
        arrays=dict(np.load(out / f"{name}.npz")),
        facts=json.loads((out / f"{name}.json").read_text()),
        notes=read_notes(notes) if notes.exists() else [],
    )


@pytest.mark.parametrize("name", PARALLEL)
def test_tokens_and_rows_equal_those_of_one_plain_engine(name, runs):
    found, plain = runs[name].arrays, runs["plain-" + CASES[name].kind].arrays
    assert sorted(found) == sorted(plain)
    for key in KEYS:
        assert np.array_equal(found["tokens-" + key], plain["tokens-" + key]), key
        for part in ("prompt-", "rows-"):
            assert not differing_cells(found[part + key], plain[part + key]).any(), part + key


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_the_oracle(name, runs, oracles):
    oracle, found = oracles(CASES[name].kind), runs[name].arrays
    for key in KEYS:
        tokens = found["tokens-" + key].tolist()
        truth = oracle.truth(tokens)
        num_prompt_tokens = len(tokens) - MAX_TOKENS
        check_greedy(truth, tokens, num_prompt_tokens, key)
        rows = found["prompt-" + key], found["rows-" + key]
        check_rows(oracle, truth, num_prompt_tokens, *rows, where=f"{name} {key}")


@pytest.mark.parametrize("name", PARALLEL)
def test_each_rank_answered_its_requests_and_has_a_prefix_cache_of_its_own(name, runs):
    facts, arrays = runs[name].facts, runs[name].arrays
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


@pytest.mark.parametrize("name", PARALLEL)
def test_the_cases_ran_as_they_are_named(name, runs):
    """Who routed whose tokens; batches that differ in size either way; ranks without requests."""
    run = runs[name]
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


@pytest.fixture(scope="module")
def server(models, oracles, environment, tmp_path_factory) -> Any:
    """`vllm serve` with two data-parallel ranks, and so with two API processes."""
    folder = tmp_path_factory.mktemp("server")
    ours = json.dumps({"notes": str(folder / "notes")})
    options = ("--data-parallel-size", "2", "--additional-config", ours)
    options += ("--max-num-batched-tokens", "64")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with serving(models("moe"), oracles("moe"), folder / "log", *options) as kit:
            yield kit


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
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    url, body = kit.url + ENDPOINTS[endpoint], request(endpoint, prompt)
    answer = httpx.post(url, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return read_answer(answer.json()), prompt


def api_processes(kit: Kit) -> set[int]:
    """Numbers of the API processes that have answered requests, by the log."""
    log = kit.log_path.read_text(errors="replace")
    found = re.findall(r"ApiServer_(\d+) .* \"POST /\S+ HTTP/1.1\" 200", log)
    return {int(number) for number in found}


def test_rows_of_a_server_with_two_ranks_and_two_api_processes_equal_the_oracle(server):
    answers: list[tuple[Answer, list[int]]] = []
    with ThreadPoolExecutor(6) as pool:
        for _ in range(ROUNDS):  # the kernel picks the process that accepts a connection
            answers += pool.map(lambda i: ask(server, i), range(NUM_ASKED))
            if len(api_processes(server)) == 2:
                break
    for answer, prompt in answers:
        server.check_choice(answer, answer.choices[0], prompt, f"prompt of {len(prompt)}")
    counted = answered(server)
    assert sum(counted.values()) == len(answers), counted
    assert min(counted["0"], counted["1"]) >= len(answers) // 4, counted
    assert api_processes(server) == {0, 1}
