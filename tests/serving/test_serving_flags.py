"""The server's flags: another encoding and layout, int16, tools and a reasoning parser."""

from __future__ import annotations

import pytest
from server_fixture import CHAT, ENDPOINTS, decode, request, seeded_prompt

PROMPT = seeded_prompt(13, 23)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "integer", "maximum": 9}},
            "required": ["at"],
        },
    },
}
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
all_endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS)


def test_info_says_what_the_contract_says(kit):
    info = kit.get("/routed_experts/info")
    version = info.pop("version")
    assert version == kit.get("/version")["version"]
    assert info == {
        "enabled": True,
        "num_layers": 6,
        "moe_layers": [1, 2, 4],
        "num_experts": 16,
        "top_k": 4,
        "dtype": "uint8",
        "encoding": "npy",
        "layout": "split",
    }


def test_info_names_the_flags_and_the_layers_with_experts(flagged):
    info = flagged.get("/routed_experts/info")
    assert (info["encoding"], info["layout"]) == ("list", "full")
    assert (info["num_layers"], info["moe_layers"], info["dtype"]) == (3, [1, 2], "int16")


@both_ways
@all_endpoints
def test_flags_hold_where_the_request_names_none(flagged, endpoint, stream):
    answer = flagged.check(ENDPOINTS[endpoint], request(endpoint, PROMPT), stream)
    assert (answer.meta["encoding"], answer.meta["layout"]) == ("list", "full")
    assert isinstance(answer.choices[0].rows, list)


@both_ways
@all_endpoints
def test_request_overrides_the_flags(flagged, endpoint, stream):
    ours = {"routed_experts_encoding": "npy", "routed_experts_layout": "split"}
    answer = flagged.check(ENDPOINTS[endpoint], request(endpoint, PROMPT, **ours), stream)
    assert (answer.meta["encoding"], answer.meta["layout"]) == ("npy", "split")
    assert decode(answer.prompt_rows, "npy", "int16").shape[1:] == (3, 8)


@both_ways
@pytest.mark.parametrize(
    "choice",
    ["auto", "none", {"type": "function", "function": {"name": "look"}}, "required"],
    ids=["auto", "none", "named", "required"],
)
def test_chat_with_tools_and_reasoning_carries_rows(flagged, stream, choice):
    body = request("chat", PROMPT, max_tokens=60, tools=[TOOL], tool_choice=choice)
    answer = flagged.check(CHAT, body, stream)
    assert answer.choices[0].finish_reason is not None
