"""Endpoints beside the three: none asks for rows that it cannot return; render hands fields on."""

from __future__ import annotations

import pytest
from server_fixture import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    GENERATE,
    OURS,
    decode,
    request,
    seeded_prompt,
)

PROMPT = seeded_prompt(14, 18)
MESSAGES = [{"role": "user", "content": "hello"}]
OTHERS = {
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 6},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 6},
    "/v1/chat/completions/batch": {"model": "tiny", "messages": [MESSAGES] * 2, "max_tokens": 6},
}


@pytest.mark.parametrize("path", OTHERS)
def test_other_endpoints_answer_without_rows(kit, path):
    status, answer = kit.post(path, OTHERS[path])
    assert status == 200, answer
    parts = [answer, *answer.get("choices", [])]
    assert all(part.get(name) is None for part in parts for name in part if "routed" in name)


def test_messages_stream_is_text_to_its_end(kit):
    body = OTHERS["/v1/messages"] | {"stream": True}
    with kit.client.stream("POST", "/v1/messages", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("event: ")]
    assert lines[-1] == "event: message_stop"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_rendered_request_has_no_new_field_where_none_was_set(kit, path):
    body = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    nulls = dict.fromkeys(OURS)
    status, answer = kit.post(f"{path}/render", body | {"model": "tiny"} | nulls)
    assert status == 200
    assert "routed_experts" not in str(answer)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_rendered_request_generates_as_many_tokens_as_asked_for(kit, endpoint):
    body = request(endpoint, PROMPT, max_tokens=16, ignore_eos=True)  # a default of the engine's
    _, rendered = kit.post(f"{ENDPOINTS[endpoint]}/render", body)
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    assert len(kit.ask(GENERATE, rendered).choices[0].tokens) == 16


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_rendered_request_asks_for_what_the_request_asked_for(kit, endpoint):
    ours = {
        "return_routed_experts": True,
        "routed_experts_prompt_start": 3,
        "routed_experts_encoding": "list",
        "routed_experts_layout": "full",
    }
    body = request(endpoint, PROMPT, **ours)
    _, rendered = kit.post(f"{ENDPOINTS[endpoint]}/render", body)
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    assert {name: rendered.get(name) for name in OURS} == dict.fromkeys(OURS) | ours
    answer = kit.ask(GENERATE, rendered)
    assert answer.meta["start"] == 3
    rows = decode(answer.choices[0].rows, "list", "uint8")
    assert len(rows) == len(rendered["token_ids"]) + len(answer.choices[0].tokens) - 1 - 3
