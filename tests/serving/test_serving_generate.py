"""The generate endpoint's own: ranks by header, max_tokens left out, fields in sampling_params."""

from __future__ import annotations

import httpx
import pytest
from server_fixture import COMPLETIONS, GENERATE, MODEL_LEN, request, seeded_prompt

PROMPT = seeded_prompt(15, MODEL_LEN - 40)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_without_max_tokens_runs_to_the_model_length(kit, stream):
    for sampling in ({}, {"max_tokens": None}):
        body = {"token_ids": PROMPT, "sampling_params": sampling | {"ignore_eos": True}}
        choice = kit.check(GENERATE, body, stream).choices[0]
        assert (len(choice.tokens), choice.finish_reason) == (40, "length")


def test_prompt_of_the_model_length_leaves_no_token_and_is_refused(kit):
    body = {"token_ids": seeded_prompt(15, MODEL_LEN), "sampling_params": {}}
    status, answer = kit.post(GENERATE, body)
    assert status == 400 and f"length of {MODEL_LEN}" in answer["error"]["message"]


@pytest.mark.parametrize("rank", ["0", "1", "-1", "one"])
def test_data_parallel_rank_means_what_it_means_to_completions(kit, rank):
    headers = {"X-data-parallel-rank": rank}
    answers = []
    for path, body in (
        (GENERATE, request("generate", [7], max_tokens=2)),
        (COMPLETIONS, request("completions", [7], max_tokens=2)),
    ):
        answer = httpx.post(kit.url + path, json=body, headers=headers)
        answers.append((answer.status_code, answer.json().get("error")))
    assert answers[0] == answers[1]
    if rank in ("1", "-1"):
        status, error = answers[0]
        assert (status, error["message"]) == (
            400,
            f"data_parallel_rank {rank} is out of range [0, 1).",
        )


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
