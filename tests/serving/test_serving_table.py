"""Endpoint x streaming x layout x encoding x finish reason, each by value.

Tokens are forced with a bias, so that every finish comes after some generated tokens.
"""

from __future__ import annotations

import pytest
from engines import END
from server_fixture import ENDPOINTS, MODEL_LEN, request, seeded_prompt

STOP = 70
PROMPT = seeded_prompt(1, 37)


def long_prompt(endpoint):
    # The chat template adds tokens of its own.
    return seeded_prompt(2, MODEL_LEN - (60 if endpoint == "chat" else 20))


def stop_string(kit, endpoint):
    """Two characters that the greedy text has in its middle for the first time."""
    text = kit.ask(ENDPOINTS["completions"], request("completions", PROMPT)).choices[0].text
    if endpoint == "chat":
        text = kit.ask(ENDPOINTS["chat"], request("chat", PROMPT)).choices[0].text
    found = next(i for i in range(4, len(text) - 2) if text.index(text[i : i + 2]) == i)
    return text[found : found + 2]


def body_of(kit, endpoint, finish, **ours):
    if finish == "length":
        return request(endpoint, PROMPT, **ours)
    if finish == "eos":
        return request(endpoint, PROMPT, logit_bias={str(END): 100}, min_tokens=5, **ours)
    if finish == "stop token":
        bias = {str(STOP): 100}
        return request(
            endpoint, PROMPT, logit_bias=bias, min_tokens=5, stop_token_ids=[STOP], **ours
        )
    if finish == "stop string":
        return request(endpoint, PROMPT, stop=[stop_string(kit, endpoint)], **ours)
    return request(endpoint, long_prompt(endpoint), max_tokens=None, ignore_eos=True, **ours)


def check_finish(kit, choice, finish, prompt, body):
    expected = "length" if finish in ("length", "model length") else "stop"
    assert choice.finish_reason == expected
    if finish == "length":
        assert len(choice.tokens) == 12
    elif finish == "eos":
        assert choice.tokens[-1] == END and len(choice.tokens) == 6
    elif finish == "stop token":
        assert choice.tokens[-1] == STOP and len(choice.tokens) == 6
    elif finish == "stop string":
        assert 1 < len(choice.tokens) < 12
    else:
        assert len(prompt) + len(choice.tokens) == MODEL_LEN


@pytest.mark.parametrize("finish", ["length", "eos", "stop token", "stop string", "model length"])
@pytest.mark.parametrize("encoding", ["npy", "list", "file"])
@pytest.mark.parametrize("layout", ["split", "full"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_row_equals_the_oracle(kit, endpoint, stream, layout, encoding, finish):
    ours = {"routed_experts_layout": layout, "routed_experts_encoding": encoding}
    body = body_of(kit, endpoint, finish, **ours)
    answer = kit.check(ENDPOINTS[endpoint], body, stream)
    assert answer.meta["layout"] == layout and answer.meta["encoding"] == encoding
    (choice,) = answer.choices.values()
    prompt = choice.prompt or answer.prompt or body["token_ids"]
    check_finish(kit, choice, finish, prompt, body)
    if endpoint == "generate" and finish == "stop string":
        assert len(choice.tokens) > 1  # this endpoint sends no text to look at
