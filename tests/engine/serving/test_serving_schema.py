"""The server's own OpenAPI: every field documented, and no answer of 500 to what it allows."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kit import ENDPOINTS, OURS, request, seeded_prompt

PROMPT = seeded_prompt(12, 12)
all_endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS)
MODELS = {
    "generate": ("GenerateRequest", "GenerateResponse", "GenerateResponseChoice"),
    "completions": ("CompletionRequest", "CompletionResponse", "CompletionResponseChoice"),
    "chat": ("ChatCompletionRequest", "ChatCompletionResponse", "ChatCompletionResponseChoice"),
}


@pytest.fixture(scope="module")
def schema(kit):
    return kit.get("/openapi.json")


@all_endpoints
def test_request_fields_are_documented(schema, endpoint):
    fields = schema["components"]["schemas"][MODELS[endpoint][0]]["properties"]
    assert all(fields[name]["description"] for name in OURS)
    assert "[0, P]" in fields["routed_experts_prompt_start"]["description"]
    for name, values in (("encoding", ["npy", "list"]), ("layout", ["split", "full"])):
        allowed = [option.get("enum") for option in fields[f"routed_experts_{name}"]["anyOf"]]
        assert values in allowed


@all_endpoints
def test_answer_fields_are_documented_with_shape_and_dtype(schema, endpoint):
    schemas = schema["components"]["schemas"]
    _, top, choice = MODELS[endpoint]
    fields = {
        "prompt_routed_experts": schemas[top]["properties"]["prompt_routed_experts"],
        "routed_experts": schemas[choice]["properties"]["routed_experts"],
    }
    for field in fields.values():
        for word in ("[rows, num_layers, top_k]", "uint8", "int16", "npy", "base64"):
            assert word in field["description"]
        assert {option["type"] for option in field["anyOf"]} == {"string", "array", "null"}
    meta = schemas["RoutedExpertsMeta"]["properties"]
    assert set(meta) == {
        *("start", "num_layers", "moe_layers", "num_experts"),
        *("top_k", "dtype", "encoding", "layout"),
    }
    assert all(field["description"] for field in meta.values())
    assert schemas[top]["properties"]["routed_experts_meta"]
    answer = schema["paths"][ENDPOINTS[endpoint]]["post"]["responses"]["200"]["content"]
    assert answer["application/json"]["schema"] == {"$ref": f"#/components/schemas/{top}"}
    assert "text/event-stream" in answer


def test_info_is_documented(schema):
    content = schema["paths"]["/routed_experts/info"]["get"]["responses"]["200"]["content"]
    assert content["application/json"]["schema"]["$ref"].endswith("/RoutedExpertsInfo")


def ours_only(schema, endpoint):
    """The server's schema with the three endpoints' new fields beside a fixed small request."""
    model = schema["components"]["schemas"][MODELS[endpoint][0]]["properties"]
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
