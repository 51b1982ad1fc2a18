"""Every 400 of the contract, with its message; the next request is right."""

from __future__ import annotations

import pytest
from server_fixture import ENDPOINTS, GENERATE, OURS, request, seeded_prompt

PROMPT = seeded_prompt(9, 21)
all_endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def refused(kit, endpoint, stream=False, prompt=PROMPT, **ours):
    """The message of a request that must get HTTP 400, also when it asks for a stream."""
    body = request(endpoint, prompt) | ours | ({"stream": True} if stream else {})
    status, answer = kit.post(ENDPOINTS[endpoint], body)
    assert status == 400, answer
    assert answer["error"]["code"] == 400
    return answer["error"]["message"]


def prompt_len(kit, endpoint):
    answer = kit.check(ENDPOINTS[endpoint], request(endpoint, PROMPT))
    return len(answer.prompt or answer.choices[0].prompt or PROMPT)


@both_ways
@all_endpoints
@pytest.mark.parametrize("past", [None, 1, 1000, 10**30])
def test_start_outside_the_prompt_is_refused_with_its_range(kit, endpoint, stream, past):
    length = prompt_len(kit, endpoint)
    start = -1 if past is None else length + past
    message = refused(kit, endpoint, stream, routed_experts_prompt_start=start)
    assert message == f"routed_experts_prompt_start must be in [0, {length}], got {start}"
    kit.check(ENDPOINTS[endpoint], request(endpoint, PROMPT), stream)


def test_start_past_one_of_several_prompts_is_refused(kit):
    prompts = [PROMPT, PROMPT[:5]]
    message = refused(kit, "completions", prompt=prompts, routed_experts_prompt_start=6)
    assert message == "routed_experts_prompt_start must be in [0, 5], got 6"


WRONG = [
    *(
        ("routed_experts_encoding", value, "'npy', 'list' or 'file'")
        for value in ("", "NPY", 1, [], {})
    ),
    *(("routed_experts_layout", value, "'split' or 'full'") for value in ("half", False)),
    *(("return_routed_experts", value, "a valid boolean") for value in ("yes", "false", 1, 0, [])),
    *(
        ("routed_experts_prompt_start", value, "a valid integer")
        for value in ("3", 2.0, 1.5, True, {})
    ),
]


@all_endpoints
@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_wrong_value_is_refused_by_name_with_the_allowed_ones(kit, endpoint, name, value, allowed):
    body, path = request(endpoint, PROMPT), ENDPOINTS[endpoint]
    wrong = body | {name: value}
    sent = [(path, wrong), (path, wrong | {"stream": True}), (f"{path}/render", wrong)]
    if endpoint == "generate":
        sent[2] = (path, body | {"sampling_params": {name: value}})
        if "encoding" in name:
            sent.pop()  # which the engine does not have
    for path, body in sent:
        status, answer = kit.post(path, body)
        assert status == 400, answer
        message = answer["error"]["message"]
        assert f"'loc': ('body', '{name}')" in message
        assert f"Input should be {allowed}" in message


@both_ways
@all_endpoints
def test_null_is_the_same_as_leaving_the_fields_out(kit, endpoint, stream):
    body = request(endpoint, PROMPT)
    answer = kit.check(ENDPOINTS[endpoint], body | dict.fromkeys(OURS), stream)
    assert answer == kit.check(ENDPOINTS[endpoint], body, stream)


@both_ways
@all_endpoints
def test_true_without_the_flag_is_refused_naming_the_flag(off, endpoint, stream):
    message = refused(off, endpoint, stream, return_routed_experts=True)
    assert message == (
        "return_routed_experts is true, but the server runs without --enable-return-routed-experts"
    )


def test_true_among_the_sampling_params_without_the_flag_is_refused_too(off):
    body = request("generate", PROMPT)
    body["sampling_params"]["return_routed_experts"] = True
    status, answer = off.post(GENERATE, body)
    assert status == 400 and "--enable-return-routed-experts" in answer["error"]["message"]


STOCK_KEYS = {
    "generate": (
        {"request_id", "choices", "prompt_logprobs", "kv_transfer_params"},
        {"index", "logprobs", "finish_reason", "token_ids"},
    ),
    "completions": (
        {"id", "object", "created", "prompt_routed_experts", "model", "choices", "service_tier"}
        | {"system_fingerprint", "usage", "kv_transfer_params"},
        {"index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids"}
        | {"prompt_logprobs", "prompt_token_ids", "routed_experts"},
    ),
    "chat": (
        {"id", "object", "created", "prompt_routed_experts", "model", "choices", "service_tier"}
        | {"system_fingerprint", "usage", "prompt_logprobs", "prompt_token_ids"}
        | {"prompt_text", "kv_transfer_params"},
        {"index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids"}
        | {"routed_experts"},
    ),
}


def check_stock_form(kit, endpoint, **ours):
    """An answer without rows has stock 0.21.0's fields, the row fields of those null."""
    status, answer = kit.post(ENDPOINTS[endpoint], request(endpoint, PROMPT, **ours))
    assert status == 200
    top, choice = STOCK_KEYS[endpoint]
    assert set(answer) == top and set(answer["choices"][0]) == choice
    for part in (answer, answer["choices"][0]):
        assert all(part[name] is None for name in part if "routed_experts" in name)
    for chunk in kit.chunks(ENDPOINTS[endpoint], request(endpoint, PROMPT, **ours)):
        assert "routed_experts" not in str(chunk)


@all_endpoints
def test_answers_without_the_flag_are_of_stock_form(off, endpoint):
    check_stock_form(off, endpoint)
    check_stock_form(off, endpoint, return_routed_experts=False)


@all_endpoints
def test_false_gives_an_answer_of_stock_form(kit, endpoint):
    check_stock_form(kit, endpoint, return_routed_experts=False)


def test_info_without_the_flag_says_so(off):
    assert set(off.get("/routed_experts/info")) == {"enabled", "version"}
    assert off.get("/routed_experts/info")["enabled"] is False
