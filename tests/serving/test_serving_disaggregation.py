"""Prefill and decode in two servers over NIXL, behind what a stock proxy does, by value.

The proxy sends a request to the prefiller with `max_tokens` 1, and to the decoder with the
`kv_transfer_params` of the first answer; it reads nothing else.
"""

from __future__ import annotations

import base64
import copy
import io
import os
import signal
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import pytest
from server_fixture import (
    COMPLETIONS,
    ENDPOINTS,
    GENERATE,
    GENERATED,
    Kit,
    decode,
    request,
    seeded_prompt,
    wait_for,
)

from vllm_r3.demo.serve import free_port

HITS = "external_prefix_cache_hits_total"
PARAMS = "kv_transfer_params"
ASK = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"]
)
P = 75
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
_seeds = count(400)


def new_prompt(length: int = P) -> list[int]:
    """A prompt that no server has seen."""
    return seeded_prompt(next(_seeds), length)


def prefill(kit: Kit, path: str, body: dict[str, Any]) -> Any:
    """The prefiller's answer to a request of one token."""
    body = copy.deepcopy(body) | {PARAMS: ASK, "stream": False}
    sampling = body.get("sampling_params", body)
    sampling["max_tokens"] = 1
    status, answer = kit.post(path, body)
    assert status == 200, answer
    return answer


class Proxy(Kit):
    """Two servers that look like one."""

    def __init__(self, prefiller: Kit, decoder: Kit) -> None:
        super().__init__(decoder.server, decoder.model_dir, decoder.oracle)
        self.prefiller, self.decoder = prefiller, decoder

    def forwarded(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What the decoder is asked."""
        return body | {PARAMS: prefill(self.prefiller, path, body)[PARAMS]}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return super().post(path, self.forwarded(path, body))

    def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return super().chunks(path, self.forwarded(path, body))

    def hits(self, ask: Callable[[], Any]) -> float:
        """Tokens whose KV the decoder takes from outside."""
        before = self.metric(HITS)
        ask()
        return self.metric(HITS) - before

    def reset(self) -> None:
        """Empty both prefix caches."""
        for kit in (self.prefiller, self.decoder):
            assert kit.client.post("/reset_prefix_cache").status_code == 200


@pytest.fixture
def proxy(prefiller, decoder):
    return Proxy(prefiller, decoder)


@both_ways
@pytest.mark.parametrize("layout, encoding", [("split", "npy"), ("full", "list")])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_row_of_a_cold_prompt(proxy, endpoint, layout, encoding, stream):
    ours = dict(routed_experts_encoding=encoding, routed_experts_layout=layout)
    body = request(endpoint, new_prompt(), **ours)
    # a chat's first block is that of the template
    assert proxy.hits(lambda: proxy.check(ENDPOINTS[endpoint], body, stream)) >= P - 16


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64])
def test_prompts_that_fill_their_blocks_and_that_do_not(proxy, length):
    body = request("generate", new_prompt(length))
    assert proxy.hits(lambda: proxy.check(GENERATE, body)) == length
    assert proxy.hits(lambda: proxy.check(GENERATE, body)) == (length - 1) % 16 + 1


def test_prefiller_sends_the_rows_of_all_the_prompt_with_one_token(proxy):
    prompt = new_prompt()
    body = request("generate", prompt, routed_experts_prompt_start=70, min_tokens=1)
    text = prefill(proxy.prefiller, GENERATE, body)[PARAMS]["routed_experts"]
    info = proxy.get("/routed_experts/info")
    assert decode(text, "npy", info["dtype"]).shape == (P, info["num_layers"], info["top_k"])
    assert proxy.hits(lambda: proxy.check(GENERATE, body)) == P


@both_ways
def test_decoder_that_holds_part_of_the_prompt_uses_its_own_rows_there(proxy, stream):
    prompt = new_prompt()
    proxy.decoder.check(GENERATE, request("generate", prompt[:50]))
    body = request("generate", prompt)
    assert proxy.hits(lambda: proxy.check(GENERATE, body, stream)) == P - 48


@both_ways
def test_three_choices(proxy, stream):
    for endpoint in ("generate", "completions"):
        body = request(endpoint, new_prompt(), n=3, temperature=1.0, seed=1)
        answer = proxy.check(ENDPOINTS[endpoint], body, stream)
        assert len(answer.choices) == 3


@both_ways
def test_stop_string(proxy, stream):
    prompt = new_prompt()
    text = proxy.ask(COMPLETIONS, request("completions", prompt)).choices[0].text
    found = next(i for i in range(4, len(text) - 2) if text.index(text[i : i + 2]) == i)
    proxy.reset()
    body = request("completions", prompt, stop=[text[found : found + 2]])
    assert proxy.check(COMPLETIONS, body, stream).choices[0].finish_reason == "stop"


def test_sixteen_at_once_preempt_each_other(proxy):
    before = proxy.metric("num_preemptions_total")
    bodies = [request("generate", new_prompt(), max_tokens=200, ignore_eos=True) for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda body: proxy.check(GENERATE, body), bodies))
    assert proxy.metric("num_preemptions_total") > before


def test_rows_of_a_slot_s_earlier_owners_never_come_back(proxy):
    bodies = [request("generate", new_prompt(), max_tokens=2) for _ in range(22)]
    for body in bodies:  # five blocks each, of a hundred
        assert proxy.hits(lambda body=body: proxy.check(GENERATE, body)) == P
    proxy.reset()
    for body in bodies[:3]:
        assert proxy.hits(lambda body=body: proxy.check(GENERATE, body)) == P


def test_kv_taken_without_rows_is_no_hit_for_a_request_that_wants_rows(proxy):
    prompt = new_prompt()
    without = request("generate", prompt, return_routed_experts=False)
    assert "routed_experts" not in prefill(proxy.prefiller, GENERATE, without)[PARAMS]
    assert proxy.hits(lambda: proxy.ask(GENERATE, without)) == P
    proxy.decoder.check(GENERATE, request("generate", prompt))
    body = request("generate", new_prompt())
    params = proxy.forwarded(GENERATE, body | {"return_routed_experts": False})[PARAMS]
    assert proxy.hits(lambda: proxy.decoder.check(GENERATE, body | {PARAMS: params})) == 0


def npy(rows: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


BAD = {
    "none": lambda rows: None,
    "a number": lambda rows: 3,
    "no base64": lambda rows: "?",
    "no rows": lambda rows: base64.b64encode(b"\x93NUMPY").decode(),
    "cut off": lambda rows: npy(rows)[:-400],
    "too few": lambda rows: npy(rows[:-1]),
    "other dtype": lambda rows: npy(rows.astype("<i2")),
    "other layers": lambda rows: npy(rows[:, 1:]),
    "no such expert": lambda rows: npy(rows | 128),
    "objects": lambda rows: base64.b64encode(np.array([{}]).dumps()).decode(),
}


@pytest.mark.parametrize("bad", BAD)
def test_prompt_is_computed_again_where_its_rows_are_of_no_use(proxy, bad):
    body = request("generate", new_prompt())
    params = proxy.forwarded(GENERATE, body)[PARAMS]
    params["routed_experts"] = BAD[bad](decode(params["routed_experts"], "npy", "uint8"))
    assert proxy.hits(lambda: proxy.decoder.check(GENERATE, body | {PARAMS: params})) == 0


def test_proxy_that_asks_the_decoder_twice(proxy):
    body = proxy.forwarded(GENERATE, request("generate", new_prompt()))
    for _ in range(2):
        proxy.decoder.check(GENERATE, body)


def test_client_that_goes_away_from_the_decoder(proxy):
    body = request("generate", new_prompt(), max_tokens=900, ignore_eos=True) | {"stream": True}
    body = proxy.forwarded(GENERATE, body)
    before = proxy.metric(GENERATED)
    with proxy.client.stream("POST", GENERATE, json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: proxy.metric("num_requests_running") == 0, "no request running")
    assert proxy.metric(GENERATED) < before + 900
    proxy.check(GENERATE, request("generate", body["token_ids"]))


def test_prefiller_that_cannot_be_reached(proxy):
    body = proxy.forwarded(GENERATE, request("generate", new_prompt()))
    body[PARAMS] |= {"remote_engine_id": str(uuid.uuid4()), "remote_port": free_port()}
    proxy.decoder.check(GENERATE, body)
    proxy.check(GENERATE, request("generate", new_prompt()))


def test_prefiller_killed_between_the_two_calls(proxy):
    """The last test: there is no prefiller any more."""
    body = proxy.forwarded(GENERATE, request("generate", new_prompt()))
    os.killpg(proxy.prefiller.server._process.pid, signal.SIGKILL)
    proxy.decoder.check(GENERATE, body)
    proxy.decoder.check(GENERATE, request("generate", new_prompt()))
