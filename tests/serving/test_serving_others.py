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


def test_responses_and_speech_ask_the_engine_for_no_rows():
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.speech_to_text.protocol import (
        TranscriptionRequest,
        TranslationRequest,
    )

    asked = ResponsesRequest(input="a").to_sampling_params(4, {})
    assert asked.return_routed_experts is False
    for kind in (TranscriptionRequest, TranslationRequest):
        speech = kind.model_construct(stream=False, vllm_xargs=None)
        assert speech.to_sampling_params(4, {}).return_routed_experts is False


def test_messages_ask_the_engine_for_no_rows():
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    body = AnthropicMessagesRequest.model_validate(OTHERS["/v1/messages"])
    chat = AnthropicServingMessages._convert_anthropic_to_openai_request(body)
    assert chat.return_routed_experts is False


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_rendered_request_has_no_new_field_where_none_was_set(kit, path):
    body = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    status, answer = kit.post(f"{path}/render", body | {"model": "tiny", "max_tokens": 4})
    assert status == 200
    assert "routed_experts" not in str(answer)


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
    assert {name: rendered[name] for name in OURS} == ours
    answer = kit.ask(GENERATE, rendered)
    assert answer.meta["start"] == 3
    rows = decode(answer.choices[0].rows, "list", "uint8")
    assert len(rows) == len(rendered["token_ids"]) + len(answer.choices[0].tokens) - 1 - 3


def test_sampling_params_may_hold_the_engine_s_two_fields(kit):
    body = request("generate", PROMPT)
    body["sampling_params"]["routed_experts_prompt_start"] = 4
    assert kit.ask(GENERATE, body).meta["start"] == 4
    body["routed_experts_prompt_start"] = 5
    kit.check(GENERATE, body)
    body["sampling_params"]["return_routed_experts"] = False
    assert kit.ask(GENERATE, body).meta is None
    body["return_routed_experts"] = True
    kit.check(GENERATE, body)
