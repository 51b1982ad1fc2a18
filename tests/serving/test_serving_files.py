"""Encoding `file` on two API processes with little room and time: a named file is whole or gone."""

from __future__ import annotations

import base64
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from pool import DIR_BYTES, FILE_TTL
from server_fixture import (
    COMPLETIONS,
    ENDPOINTS,
    GENERATE,
    Kit,
    file_facts,
    read_answer,
    request,
    seeded_prompt,
    wait_for,
)

from vllm_r3.demo.serve import HOST

FILES = "/routed_experts/files"
NUM_ASKED, AT_ONCE = 200, 50
GONE = (
    f"or no longer: files are removed after {FILE_TTL} s, and the oldest first above {DIR_BYTES} "
    "bytes in all"
)


def fields(answer):
    """Each field of rows: what holds it, and its name."""
    names = ("routed_experts", "prompt_routed_experts")
    parts = [answer, *answer["choices"]]
    return [(part, name) for part in parts for name in names if part.get(name) is not None]


def references(answer):
    return [part[name] for part, name in fields(answer)]


def fetch(kit, reference):
    """Get a file over any of many connections, from either API process; None if gone."""
    answer = kit.client.get(f"{FILES}/{reference['name']}")
    if answer.status_code == 404:
        assert answer.json()["error"]["message"].endswith(GONE)
        return None
    assert answer.status_code == 200
    assert file_facts(answer.content) == reference | {"name": ""}
    return answer.content


def listed(kit):
    return [path for path in kit.rows_dir.iterdir() if path.suffix != ".lock"]


def ask(kit, number):
    """Ask for files and fetch them; return prompt, answer and what each field's file held."""
    endpoint = list(ENDPOINTS)[number % 3]
    layout = ("split", "full")[number % 2]
    prompt = seeded_prompt(1000 + number, 20 + number % 40)
    ours = {"routed_experts_encoding": "file", "routed_experts_layout": layout}
    sampling = dict(max_tokens=1 + number % 9, n=1 + number % 2, temperature=1.0)
    body = request(endpoint, prompt, **sampling, **ours)
    if endpoint == "completions":
        body["prompt"] = [prompt, prompt[:7]]
    status, answer = kit.post(ENDPOINTS[endpoint], body)
    assert status == 200, answer
    return prompt, answer, [fetch(kit, reference) for reference in references(answer)]


def check(kit, prompt, answer, found):
    """Compare every row with the oracle."""
    for (part, name), data in zip(fields(answer), found, strict=True):
        part[name] = base64.b64encode(data).decode()
    answer["routed_experts_meta"]["encoding"] = "npy"
    read = read_answer(answer)
    for choice in read.choices.values():
        kit.check_choice(read, choice, choice.prompt or read.prompt or prompt, "a file")


def test_every_file_of_200_answers_at_once_is_whole_or_gone(two_ranks: Kit):
    with ThreadPoolExecutor(AT_ONCE) as threads:
        asked = list(threads.map(lambda number: ask(two_ranks, number), range(NUM_ASKED)))
    named = [reference for _, answer, _ in asked for reference in references(answer)]
    whole = [data is not None for *_, found in asked for data in found]
    print(f"{len(named)} files named, {sum(whole)} whole, the others gone before they were read")
    assert sum(whole) > AT_ONCE
    assert sum(reference["nbytes"] for reference in named) > DIR_BYTES
    assert None in [fetch(two_ranks, reference) for reference in named]
    assert len({reference["name"] for reference in named}) == len(named)
    assert sum(path.stat().st_size for path in listed(two_ranks)) <= DIR_BYTES
    wait_for(lambda: not listed(two_ranks), "files gone after their time", FILE_TTL + 10)
    assert {fetch(two_ranks, reference) for reference in named[-20:]} == {None}
    complete = [one for one in asked if None not in one[-1]]
    for one in complete:
        check(two_ranks, *one)
    assert len(complete) > AT_ONCE / 2


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_files_hold_the_bytes_of_the_npy_answer(two_ranks: Kit, endpoint):
    prompt = seeded_prompt(5, 40)
    answers = {}
    for encoding in ("npy", "file"):
        body = request(endpoint, prompt, routed_experts_encoding=encoding)
        answer = two_ranks.check(ENDPOINTS[endpoint], body)
        fields = (answer.choices[0].rows, answer.prompt_rows or answer.choices[0].prompt_rows)
        answers[encoding] = [two_ranks.decode(field, answer.meta) for field in fields]
    for npy, file in zip(*answers.values(), strict=True):
        np.testing.assert_array_equal(npy, file)


def test_one_token_and_several_prompts_and_choices_have_a_file_for_each_field(two_ranks: Kit):
    ours = {"routed_experts_encoding": "file"}
    prompts = [seeded_prompt(6, 9), seeded_prompt(7, 30)]
    body = request("completions", prompts, max_tokens=1, n=2, temperature=1.0, **ours)
    status, answer = two_ranks.post(COMPLETIONS, body)
    assert status == 200 and len(references(answer)) == 8
    read = read_answer(answer)
    for choice in read.choices.values():
        assert two_ranks.decode(choice.rows, read.meta).shape[0] == 0
        two_ranks.check_choice(read, choice, choice.prompt, "one token")


def test_key_is_asked_for_and_parts_are_sent(two_ranks: Kit):
    body = request("generate", seeded_prompt(8, 33), routed_experts_encoding="file")
    _, answer = two_ranks.post(GENERATE, body)
    reference = references(answer)[0]
    path = f"{FILES}/{reference['name']}"
    assert httpx.get(two_ranks.url + path).status_code == 401
    assert httpx.get(two_ranks.url + path, headers={"Host": "x/?"}).status_code == 401
    part = two_ranks.client.get(path, headers={"Range": "bytes=0-5"})
    assert (part.status_code, part.content) == (206, b"\x93NUMPY")
    assert part.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    "name", ["../secret", "..%2f..%2fetc%2fpasswd", "%2e%2e/x", ".lock", "a.npy"]
)
def test_no_other_file_is_sent(two_ranks: Kit, name):
    (two_ranks.rows_dir.parent / "secret").write_text("secret")
    answer = two_ranks.client.get(f"{FILES}/{name}")
    assert answer.status_code == 404


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_server_without_a_directory_refuses_the_encoding(flagged: Kit, endpoint, stream):
    body = request(endpoint, seeded_prompt(9, 12), routed_experts_encoding="file")
    status, answer = flagged.post(ENDPOINTS[endpoint], body | {"stream": stream})
    assert status == 400
    assert answer["error"]["message"] == (
        "routed_experts_encoding is file, but the server runs without --routed-experts-dir"
    )


def test_nothing_is_left_after_the_server(two_ranks: Kit, pool):
    body = request("generate", seeded_prompt(10, 33), routed_experts_encoding="file")
    two_ranks.post(GENERATE, body)
    assert listed(two_ranks)
    assert len(list(two_ranks.rows_dir.glob(".*.lock"))) == 2  # one for each API process
    with socket.create_connection((HOST, two_ranks.server.port)) as client:
        # a request that one of them waits for, until it is killed
        client.sendall(f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode())
        time.sleep(0.5)
        pool.stop("two_ranks")
    assert list(two_ranks.rows_dir.iterdir()) == []
