"""n > 1, several prompts, starts, turns, echo: what an answer holds, by value."""

from __future__ import annotations

import pytest
from server_fixture import CHAT, COMPLETIONS, ENDPOINTS, decode, request, seeded_prompt

PROMPT = seeded_prompt(3, 35)
P = len(PROMPT)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
all_endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS)


@both_ways
@all_endpoints
@pytest.mark.parametrize("layout", ["split", "full"])
def test_three_choices_are_all_answered_and_share_one_prompt(kit, endpoint, stream, layout):
    body = request(endpoint, PROMPT, n=3, temperature=1.0, seed=5, routed_experts_layout=layout)
    answer = kit.check(ENDPOINTS[endpoint], body, stream)
    assert sorted(answer.choices) == [0, 1, 2]
    assert len({tuple(c.tokens) for c in answer.choices.values()}) == 3
    assert all(c.prompt_rows is None for c in answer.choices.values())


@both_ways
@pytest.mark.parametrize("layout", ["split", "full"])
def test_each_choice_of_several_prompts_has_its_own_prompt_rows(kit, stream, layout):
    prompts = [seeded_prompt(4, 20), seeded_prompt(5, 33)]
    body = request("completions", [], n=2, temperature=1.0, seed=6, routed_experts_layout=layout)
    body["prompt"] = prompts
    answer = kit.check(COMPLETIONS, body, stream)
    assert sorted(answer.choices) == [0, 1, 2, 3]
    assert [answer.choices[i].prompt for i in range(4)] == [p for p in prompts for _ in "ab"]
    assert answer.prompt_rows is None
    assert all((c.prompt_rows is None) == (layout == "full") for c in answer.choices.values())


@both_ways
@all_endpoints
def test_one_generated_token_has_an_empty_array(kit, endpoint, stream):
    for encoding, shape in (("npy", (0, 6, 4)), ("list", (0,))):
        body = request(endpoint, PROMPT, max_tokens=1, routed_experts_encoding=encoding)
        choice = kit.check(ENDPOINTS[endpoint], body, stream).choices[0]
        assert decode(choice.rows, encoding, "uint8").shape == shape
        assert encoding != "list" or choice.rows == []


@both_ways
@all_endpoints
@pytest.mark.parametrize("layout", ["split", "full"])
@pytest.mark.parametrize("start", [0, 1, P - 1, P])
def test_start_leaves_out_exactly_the_rows_before_it(kit, endpoint, stream, layout, start):
    body = request(
        endpoint, PROMPT, routed_experts_prompt_start=start, routed_experts_layout=layout
    )
    kit.check(ENDPOINTS[endpoint], body, stream)


@both_ways
def test_echo_with_no_token_asked_for_has_the_prompt_rows(kit, stream):
    body = request("completions", PROMPT, echo=True, max_tokens=0)
    answer = kit.check(COMPLETIONS, body, stream)
    assert len(answer.choices[0].tokens) == 1  # 0.21.0 samples one and hides its text


@both_ways
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_echo_does_not_change_the_rows(kit, endpoint, stream):
    body = request(endpoint, PROMPT, echo=True)
    if endpoint == "completions":
        body["return_token_ids"] = False  # with it, 0.21.0 echoes no text
        body["logprobs"] = 1
        answer = kit.ask(COMPLETIONS, body, stream)
        plain = kit.ask(COMPLETIONS, request("completions", PROMPT), stream)
        assert answer.choices[0].text.endswith(plain.choices[0].text)
        assert len(answer.choices[0].text) > len(plain.choices[0].text)
        assert answer.choices[0].rows == plain.choices[0].rows
        assert answer.prompt_rows == plain.prompt_rows
    else:
        kit.check(CHAT, body, stream)


@both_ways
@all_endpoints
def test_log_probabilities_and_rows_have_the_length_of_the_tokens(kit, endpoint, stream):
    options = {"logprobs": 1} if endpoint != "chat" else {"logprobs": True, "top_logprobs": 1}
    body = request(endpoint, PROMPT, stop=["e", "t", "a", "o"], max_tokens=40, **options)
    answer = kit.check(ENDPOINTS[endpoint], body, stream)
    (choice,) = answer.choices.values()
    assert choice.finish_reason == "stop" and len(choice.tokens) < 40
    if not stream:
        found = kit.post(ENDPOINTS[endpoint], body)[1]["choices"][0]["logprobs"]
        entries = found["tokens"] if endpoint == "completions" else found["content"]
        assert len(entries) == len(choice.tokens)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_beam_search_answers_as_stock_and_refuses_to_return_rows(kit, endpoint):
    body = request(endpoint, PROMPT, n=3, use_beam_search=True)
    answer = kit.ask(ENDPOINTS[endpoint], body)
    assert len({tuple(c.tokens) for c in answer.choices.values()}) == 3
    assert answer.meta is None and answer.prompt_rows is None
    assert all(c.rows is None for c in answer.choices.values())
    status, refused = kit.post(ENDPOINTS[endpoint], body | {"return_routed_experts": True})
    assert (status, refused["error"]["message"]) == (
        400,
        "return_routed_experts is true, but beam search returns no routed experts: "
        "leave out one of the two",
    )


def test_sixteen_requests_at_once_over_three_endpoints(kit):
    from concurrent.futures import ThreadPoolExecutor

    jobs = [
        (ENDPOINTS[name], request(name, seeded_prompt(20 + i, 10 + 5 * i)), bool(i % 2))
        for i in range(16)
        for name in [list(ENDPOINTS)[i % 3]]
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda job: kit.ask(*job), jobs))
    for (path, body, _), answer in zip(jobs, answers, strict=True):
        (choice,) = answer.choices.values()
        prompt = choice.prompt or answer.prompt or body["token_ids"]
        kit.check_choice(answer, choice, prompt, path)
