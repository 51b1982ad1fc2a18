"""The server's own OpenAPI: every field documented, and no answer of 500 to what it allows."""

from __future__ import annotations

import json
import random

import pytest
from server_fixture import ENDPOINTS, OURS, request, seeded_prompt

JSON = {"Content-Type": "application/json"}
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


def allowed_values(field, rng):
    """Values that a field's schema allows."""
    for option in field.get("anyOf", [field]):
        if "enum" in option:
            yield from option["enum"]
        elif option["type"] == "boolean":
            yield from (True, False)
        elif option["type"] == "integer":
            yield from (int(option["minimum"]), rng.randrange(13), rng.randrange(10**6), 10**40)
        else:
            assert option["type"] == "null", option
            yield None


def any_value(rng, depth=0):
    """Any JSON value: what a schema allows now and then, mostly what it does not."""
    draw = rng.randrange(10 if depth < 2 else 8)
    if draw == 8:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if draw == 9:
        return {str(rng.randrange(9)): any_value(rng, depth + 1) for _ in range(rng.randrange(3))}
    text = "".join(chr(rng.choice([0, 34, 92, 97, 0xE9, 0x1F600])) for _ in range(rng.randrange(5)))
    return (
        *(None, True, rng.randrange(-9, 20), rng.choice([-1, 1]) * 10 ** rng.randrange(60)),
        *(rng.uniform(-2, 40), 1e308, rng.choice(["npy", "list", "split", "full", "true"]), text),
    )[draw]


def statuses_of(kit, endpoint, requests):
    """Send small requests, streamed or not; the statuses found, none of them of a server error."""
    found = set()
    for number, ours in enumerate(requests):
        body = request(endpoint, PROMPT, max_tokens=2) | {"stream": number % 2 == 1} | ours
        answer = kit.client.post(ENDPOINTS[endpoint], content=json.dumps(body), headers=JSON)
        assert answer.status_code in (200, 400), (ours, answer.text)
        assert '"code": 500' not in answer.text and '"code":500' not in answer.text, ours
        found.add(answer.status_code)
    return found


@all_endpoints
def test_values_that_the_schema_allows_find_no_server_error(kit, schema, endpoint):
    rng = random.Random(1)
    fields = schema["components"]["schemas"][MODELS[endpoint][0]]["properties"]
    values = {name: list(allowed_values(fields[name], rng)) for name in OURS}
    drawn = [{name: rng.choice(values[name]) for name in OURS} for _ in range(60)]
    assert statuses_of(kit, endpoint, drawn) == {200, 400}  # 400: a start past the prompt


@all_endpoints
def test_any_value_in_the_new_fields_finds_no_server_error(kit, endpoint):
    rng = random.Random(2)
    drawn = [
        {name: any_value(rng) for name in rng.sample(OURS, rng.randrange(1, 5))} for _ in range(100)
    ]
    assert statuses_of(kit, endpoint, drawn) == {200, 400}
