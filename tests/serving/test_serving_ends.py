"""Requests that end early: by /pause?mode=abort, by id, or because the client went away."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server_fixture import (
    ENDPOINTS,
    GENERATE,
    GENERATED,
    HOST,
    aborted,
    decode,
    read_answer,
    read_chunks,
    request,
    seeded_prompt,
    wait_for,
)

from vllm_r3.checks.rows import differing_cells

PROMPT = seeded_prompt(10, 30)
BY_ID = "/inference/v1/abort_requests"
LONG = {"max_tokens": 900, "ignore_eos": True}
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
all_endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS)


def running(kit):
    """Requests that the engine has, waiting or running."""
    return kit.metric("num_requests_running", "num_requests_waiting")


@pytest.fixture(autouse=True)
def next_request_is_right(kit):
    yield
    kit.resume()
    kit.check(GENERATE, request("generate", PROMPT))


def is_aborted(answer):
    return all(c.finish_reason == "abort" and c.tokens for c in answer.choices.values())


def abort(kit, path, body, stream):
    """The answer to a request that is aborted after some tokens, every row checked."""
    answer = aborted(kit, lambda: kit.ask(path, body, stream), is_aborted)
    for index, choice in answer.choices.items():
        prompt = choice.prompt or answer.prompt or body["token_ids"]
        kit.check_choice(answer, choice, prompt, f"{path} choice {index}")
    return answer


@both_ways
@all_endpoints
@pytest.mark.parametrize("layout", ["split", "full"])
def test_aborted_request_carries_the_rows_of_its_tokens(kit, endpoint, stream, layout):
    body = request(endpoint, PROMPT, routed_experts_layout=layout, **LONG)
    answer = abort(kit, ENDPOINTS[endpoint], body, stream)
    assert answer.choices[0].finish_reason == "abort"
    assert 0 < len(answer.choices[0].tokens) < 900


@both_ways
def test_both_choices_of_an_aborted_request_carry_their_rows(kit, stream):
    body = request("generate", PROMPT, n=2, temperature=1.0, **LONG)
    answer = abort(kit, GENERATE, body, stream)
    assert [answer.choices[i].finish_reason for i in (0, 1)] == ["abort", "abort"]


def test_continuation_after_resume_returns_the_rest(kit):
    first = abort(kit, GENERATE, request("generate", PROMPT, **LONG), False)
    held = [*PROMPT, *first.choices[0].tokens]
    start = len(held) - 1
    rest = kit.check(GENERATE, request("generate", held, routed_experts_prompt_start=start))
    tokens = [*held, *rest.choices[0].tokens]
    parts = (*(first.prompt_rows, first.choices[0].rows), *(rest.prompt_rows, rest.choices[0].rows))
    joined = np.concatenate([decode(part, "npy", "uint8") for part in parts])
    alone = kit.check(GENERATE, request("generate", tokens, max_tokens=1))
    expected = decode(alone.prompt_rows, "npy", "uint8")[: len(tokens) - 1]
    assert not differing_cells(joined, expected).any()


@all_endpoints
def test_request_aborted_before_its_first_token_is_answered_without_rows(kit, endpoint):
    kit.pause("abort")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(kit.ask, ENDPOINTS[endpoint], request(endpoint, PROMPT))
        while not job.done():  # until the request has arrived
            time.sleep(0.05)
            kit.pause("abort")
        answer = job.result()
    assert answer.choices[0].finish_reason == "abort"
    assert answer.choices[0].tokens == [] and answer.choices[0].rows is None


@both_ways
@all_endpoints
def test_client_that_goes_away_leaves_nothing_running(kit, endpoint, stream):
    body = request(endpoint, PROMPT, n=16, temperature=1.0, **LONG) | {"stream": stream}
    before = kit.metric(GENERATED)
    connection = http.client.HTTPConnection(HOST, kit.server.port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", ENDPOINTS[endpoint], json.dumps(body), headers)
    wait_for(lambda: kit.metric(GENERATED) > before, "tokens")
    connection.close()
    wait_for(lambda: running(kit) == 0, "no request running")
    assert kit.metric(GENERATED) < before + 16 * 900


def abort_requests(kit, path="/abort_requests", **body):
    """Number of requests that were ended."""
    status, answer = kit.post(path, body)
    assert (status, answer["status"]) == (200, "aborted"), answer
    return answer["aborted"]


def ask_named(kit, name, endpoint, body):
    headers = {"X-Request-Id": name}
    if body.get("stream"):
        with kit.client.stream("POST", ENDPOINTS[endpoint], json=body, headers=headers) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        return read_chunks([json.loads(line) for line in lines[:-1]])
    return read_answer(kit.client.post(ENDPOINTS[endpoint], json=body, headers=headers).json())


def test_requests_aborted_by_id_carry_their_rows_and_leave_others_alone(kit):
    """Of 60, on all endpoints, one in five streams: 48 are ended, running or waiting."""
    names = [*ENDPOINTS] * 20
    bodies = {}
    for number, endpoint in enumerate(names):
        options = LONG | ({"max_tokens": 40} if number % 5 == 4 else {})
        body = request(endpoint, seeded_prompt(100 + number, 10 + number), **options)
        bodies[f"{number}-of-60"] = endpoint, body | {"stream": number % 5 == 0}
    to_abort = [name for number, name in enumerate(bodies) if number % 5 != 4]
    done = kit.metric(GENERATED)
    with ThreadPoolExecutor(61) as pool:
        jobs = {name: pool.submit(ask_named, kit, name, *named) for name, named in bodies.items()}
        wait_for(lambda: running(kit) >= len(to_abort), "all requests")
        wait_for(lambda: kit.metric(GENERATED) > done + 600, "tokens of most")
        assert abort_requests(kit, BY_ID, request_ids=[*to_abort, "unknown"]) == len(to_abort)
        answers = {name: job.result() for name, job in jobs.items()}
    wait_for(lambda: running(kit) == 0, "no request running")
    for name, answer in answers.items():
        choice, (_, body) = answer.choices[0], bodies[name]
        assert choice.finish_reason == ("abort" if name in to_abort else "length")
        if choice.tokens:
            prompt = choice.prompt or answer.prompt or body["token_ids"]
            kit.check_choice(answer, choice, prompt, name)
    assert sum(bool(answers[name].choices[0].tokens) for name in to_abort) > 10
    assert all(len(answers[name].choices[0].tokens) < 900 for name in to_abort)


@both_ways
def test_choices_and_prompts_of_an_id_are_aborted_together(kit, stream):
    several = {"prompt": [PROMPT, PROMPT[:9]]}
    body = request("completions", PROMPT, n=2, temperature=1.0, **LONG) | several
    before = kit.metric(GENERATED)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(ask_named, kit, "both", "completions", body | {"stream": stream})
        wait_for(lambda: kit.metric(GENERATED) > before + 20, "tokens")
        assert abort_requests(kit, request_ids=["cmpl-both"]) == 2  # prompts
        answer = job.result()
    assert sorted(answer.choices) == [0, 1, 2, 3]
    for index, choice in answer.choices.items():
        assert choice.finish_reason == "abort"
        kit.check_choice(answer, choice, choice.prompt or several["prompt"][index // 2], str(index))


def test_abort_of_all_pauses_nothing(kit):
    before = kit.metric(GENERATED)
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(kit.ask, GENERATE, request("generate", PROMPT, **LONG)) for _ in range(8)
        ]
        wait_for(lambda: running(kit) == 8, "all requests")
        wait_for(lambda: kit.metric(GENERATED) > before + 40, "tokens")
        assert abort_requests(kit) == 8
        answers = [job.result() for job in jobs]
    assert {a.choices[0].finish_reason for a in answers} == {"abort"}
    kit.check(GENERATE, request("generate", PROMPT))  # without a resume
    assert abort_requests(kit) == 0


def test_a_slow_reader_gets_every_row_once(kit):
    """Twenty log-probabilities a token make the stream larger than the socket's buffers."""
    body = request("generate", PROMPT, logprobs=20, **LONG) | {"stream": True}
    chunks, end = [], kit.metric(GENERATED) + 900
    with kit.client.stream("POST", GENERATE, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        wait_for(lambda: kit.metric(GENERATED) >= end, "all tokens, while nothing is read")
        chunks = [line for line in lines if line.startswith("data: {")]
    assert sum('"routed_experts":' in chunk for chunk in chunks) == 1
    assert sum('"prompt_routed_experts":' in chunk for chunk in chunks) == 1
