"""Schemathesis against the server's own OpenAPI: no answer of 500 to the new fields."""

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
def schema(kit):
    return kit.get("/openapi.json")


def ours_only(schema, endpoint):
    """The server's schema with the three endpoints' new fields beside a fixed small request."""
    model = schema["components"]["schemas"][MODELS[endpoint]]["properties"]
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


@all_endpoints
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_schemathesis_finds_no_server_error(kit, schema, endpoint, mode):
    generation = schemathesis.GenerationMode(mode)
    operation = schemathesis.openapi.from_dict(ours_only(schema, endpoint))[ENDPOINTS[endpoint]][
        "POST"
    ]
    base = request(endpoint, PROMPT, max_tokens=2)
    statuses = set()

    @bounded(40)
    @given(case=operation.as_strategy(generation_mode=generation), stream=st.booleans())
    def try_case(case, stream):
        ours = case.body if isinstance(case.body, dict) else {"routed_experts_layout": case.body}
        body = json.dumps(base | ours | {"stream": stream}, default=repr)
        answer = kit.client.post(
            ENDPOINTS[endpoint], content=body, headers={"Content-Type": "application/json"}
        )
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400), (ours, answer.text)
        assert '"code": 500' not in answer.text and '"code":500' not in answer.text, ours

    try_case()
    assert 400 in statuses and (mode == "negative" or 200 in statuses)


any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@all_endpoints
def test_any_json_in_the_new_fields_finds_no_server_error(kit, endpoint):
    base = request(endpoint, PROMPT, max_tokens=2)

    @bounded(60)
    @given(ours=st.dictionaries(st.sampled_from(OURS), any_json, min_size=1))
    def try_fields(ours):
        answer = kit.client.post(ENDPOINTS[endpoint], json=base | ours)
        assert answer.status_code in (200, 400), (ours, answer.text)

    try_fields()
