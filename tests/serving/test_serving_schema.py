"""The server's own OpenAPI: our fields documented, and no answer of 500 to any value in them."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from server_fixture import ENDPOINTS, OURS, request, seeded_prompt

PROMPT = seeded_prompt(12, 12)
all_endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS)
MODELS = {
    "generate": "GenerateRequest",
    "completions": "CompletionRequest",
    "chat": "ChatCompletionRequest",
}


@pytest.fixture(scope="module")
def schemas(kit):
    return kit.get("/openapi.json")["components"]["schemas"]


@all_endpoints
def test_request_fields_are_documented(schemas, endpoint):
    fields = schemas[MODELS[endpoint]]["properties"]
    assert all(fields[name]["description"] for name in OURS)
    assert "[0, P]" in fields["routed_experts_prompt_start"]["description"]
    for name, values in (("encoding", ["npy", "list", "file"]), ("layout", ["split", "full"])):
        allowed = [option.get("enum") for option in fields[f"routed_experts_{name}"]["anyOf"]]
        assert values in allowed


def test_info_is_documented(schemas):
    enabled = schemas["EnabledRoutedExperts"]["properties"]
    assert len(enabled) == 9
    assert all(f.get("description") for name, f in enabled.items() if name != "enabled")
    assert set(schemas["DisabledRoutedExperts"]["properties"]) == {"enabled", "version"}


def ours_only(schemas, endpoint):
    """The server's schema with the endpoint's new fields beside a fixed small request."""
    model = schemas[MODELS[endpoint]]["properties"]
    body = {
        "type": "object",
        "properties": {name: model[name] for name in OURS},
        "additionalProperties": False,
    }
    operation = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "rows"}, "400": {"description": "refused"}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "ours", "version": "1"},
        "paths": {ENDPOINTS[endpoint]: {"post": operation}},
    }


def bounded(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def status_of(kit, endpoint, ours, stream):
    """The status, which is no server error's, nor is one in the stream."""
    body = request(endpoint, PROMPT, max_tokens=2) | ours | {"stream": stream}
    content = json.dumps(body, default=repr)
    headers = {"Content-Type": "application/json"}
    answer = kit.client.post(ENDPOINTS[endpoint], content=content, headers=headers)
    assert answer.status_code in (200, 400), (ours, answer.text)
    assert '"code": 500' not in answer.text and '"code":500' not in answer.text, ours
    return answer.status_code


@all_endpoints
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_schemathesis_finds_no_server_error(kit, schemas, endpoint, mode):
    generation = schemathesis.GenerationMode(mode)
    schema = schemathesis.openapi.from_dict(ours_only(schemas, endpoint))
    cases = schema[ENDPOINTS[endpoint]]["POST"].as_strategy(generation_mode=generation)
    statuses = set()

    @bounded(40)
    @given(case=cases, stream=st.booleans())
    def try_case(case, stream):
        ours = case.body if isinstance(case.body, dict) else {"routed_experts_layout": case.body}
        statuses.add(status_of(kit, endpoint, ours, stream))

    try_case()
    assert 400 in statuses and (mode == "negative" or 200 in statuses)


scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
any_json = st.recursive(
    scalars | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@all_endpoints
def test_any_json_in_the_new_fields_finds_no_server_error(kit, endpoint):
    @bounded(60)
    @given(ours=st.dictionaries(st.sampled_from(OURS), any_json, min_size=1), stream=st.booleans())
    def try_fields(ours, stream):
        status_of(kit, endpoint, ours, stream)

    try_fields()
