"""Requests that end early: by /pause?mode=abort, or because the client went away."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from server_fixture import ENDPOINTS, GENERATE, decode, request, seeded_prompt

from vllm_r3.checks.rows import differing_cells

PROMPT = seeded_prompt(10, 30)
ATTEMPTS = 30
LONG = {"max_tokens": 900, "ignore_eos": True}
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
all_endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS)


def running(kit):
    """Requests that the engine has, waiting or running."""
    found = kit.client.get("/metrics").text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in found if line.startswith(names))


def wait_for(condition, what, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def generated(kit):
    found = kit.client.get("/metrics").text.splitlines()
    name = "vllm:generation_tokens_total{"
    return sum(float(line.split()[-1]) for line in found if line.startswith(name))


@pytest.fixture
def paused(kit):
    """Call it to abort what runs; the server is resumed in the end."""

    def pause(mode="abort"):
        assert kit.client.post("/pause", params={"mode": mode}).status_code == 200

    yield pause
    assert kit.client.post("/resume").status_code == 200
    kit.check(GENERATE, request("generate", PROMPT))


def aborted(kit, pause, path, body, stream):
    """The answer to a request that is aborted after some tokens.

    Sixteen more choices beside it slow it down to some seconds, and the server's own count says
    when they are under way. On a busy machine this process may yet sleep until it is through, or
    be too early for this one: then once more, a little later.
    """
    others = request("generate", PROMPT, n=16, temperature=1.0, **LONG)
    for attempt in range(ATTEMPTS):
        before = generated(kit)
        with ThreadPoolExecutor(2) as pool:
            job = pool.submit(kit.ask, path, body, stream)
            pool.submit(kit.ask, GENERATE, others)
            under_way = before + 68 * (attempt % 10 + 1)
            wait_for(lambda: job.done() or generated(kit) >= under_way, "tokens", 120)  # noqa: B023
            while not job.done():  # until the request has arrived
                pause()
        answer = job.result()
        choices = list(answer.choices.values())
        if choices and all(c.finish_reason == "abort" and c.tokens for c in choices):
            for index, choice in answer.choices.items():
                prompt = choice.prompt or answer.prompt or body["token_ids"]
                kit.check_choice(answer, choice, prompt, f"{path} choice {index}")
            return answer
        assert kit.client.post("/resume").status_code == 200
    raise AssertionError(f"in {ATTEMPTS} attempts no request was aborted between two tokens")


@both_ways
@all_endpoints
@pytest.mark.parametrize("layout", ["split", "full"])
def test_aborted_request_carries_the_rows_of_its_tokens(kit, paused, endpoint, stream, layout):
    body = request(endpoint, PROMPT, routed_experts_layout=layout, **LONG)
    answer = aborted(kit, paused, ENDPOINTS[endpoint], body, stream)
    assert answer.choices[0].finish_reason == "abort"
    assert 0 < len(answer.choices[0].tokens) < 900


@both_ways
def test_both_choices_of_an_aborted_request_carry_their_rows(kit, paused, stream):
    body = request("generate", PROMPT, n=2, temperature=1.0, **LONG)
    answer = aborted(kit, paused, GENERATE, body, stream)
    assert [answer.choices[i].finish_reason for i in (0, 1)] == ["abort", "abort"]


def test_continuation_after_resume_returns_the_rest(kit, paused):
    first = aborted(kit, paused, GENERATE, request("generate", PROMPT, **LONG), False)
    held = [*PROMPT, *first.choices[0].tokens]
    assert kit.client.post("/resume").status_code == 200
    start = len(held) - 1
    rest = kit.check(GENERATE, request("generate", held, routed_experts_prompt_start=start))
    tokens = [*held, *rest.choices[0].tokens]
    parts = (*(first.prompt_rows, first.choices[0].rows), *(rest.prompt_rows, rest.choices[0].rows))
    joined = np.concatenate([decode(part, "npy", "uint8") for part in parts])
    alone = kit.check(GENERATE, request("generate", tokens, max_tokens=1))
    expected = decode(alone.prompt_rows, "npy", "uint8")[: len(tokens) - 1]
    assert not differing_cells(joined, expected).any()


@all_endpoints
def test_request_aborted_before_its_first_token_is_answered_without_rows(kit, paused, endpoint):
    paused()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(kit.ask, ENDPOINTS[endpoint], request(endpoint, PROMPT))
        while not job.done():  # until the request has arrived
            time.sleep(0.2)
            paused()
        answer = job.result()
    assert answer.choices[0].finish_reason == "abort"
    assert answer.choices[0].tokens == [] and answer.choices[0].rows is None


def go_away(kit, path, body):
    """Ask and hang up: after the first line of a stream, else after 0.4 s without an answer."""
    with httpx.Client(base_url=kit.url, timeout=0.4) as client:
        try:
            with client.stream("POST", path, json=body) as answer:
                next(answer.iter_lines())
        except httpx.ReadTimeout:
            pass


@both_ways
@all_endpoints
def test_client_that_goes_away_leaves_nothing_running(kit, endpoint, stream):
    body = request(endpoint, PROMPT, n=16, temperature=1.0, **LONG) | {"stream": stream}
    for _ in range(ATTEMPTS):  # as above
        before = generated(kit)
        go_away(kit, ENDPOINTS[endpoint], body)
        wait_for(lambda: running(kit) == 0, "no request running")
        if generated(kit) < before + 16 * 900:
            break
    else:
        raise AssertionError(f"in {ATTEMPTS} attempts every request ran to its end")
    kit.check(ENDPOINTS[endpoint], request(endpoint, PROMPT), stream)


def test_a_slow_reader_gets_every_row_once(kit):
    """Twenty log-probabilities a token make the stream larger than the socket's buffers."""
    body = request("generate", PROMPT, logprobs=20, **LONG) | {"stream": True}
    chunks = []
    with kit.client.stream("POST", GENERATE, json=body) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if number == 0:
                time.sleep(3)
            if line.startswith("data: {"):
                chunks.append(line)
    assert sum('"routed_experts":' in chunk for chunk in chunks) == 1
    assert sum('"prompt_routed_experts":' in chunk for chunk in chunks) == 1
