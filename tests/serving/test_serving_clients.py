"""Clients that know nothing of this project: OpenAI's, vLLM's benchmark, older and newer habits."""

from __future__ import annotations

import base64
import io

import numpy as np
import openai
import pytest
from forked import run_vllm
from oracle_checks import check_rows
from server_fixture import COMPLETIONS, GENERATE, decode, request, seeded_prompt

PROMPT = seeded_prompt(11, 25)
MESSAGES = [{"role": "user", "content": "say it"}]


@pytest.fixture(scope="module")
def client(kit):
    return openai.OpenAI(base_url=f"{kit.url}/v1", api_key="none", max_retries=0)


def compare(kit, prompt, tokens, prompt_rows, rows):
    truth = kit.oracle.truth([*prompt, *tokens])
    parts = [decode(part, "npy", "uint8") for part in (prompt_rows, rows)]
    check_rows(kit.oracle, truth, len(prompt), *parts)


def test_openai_client_reads_a_completion(kit, client):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=9, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    compare(kit, PROMPT, choice.token_ids, answer.prompt_routed_experts, choice.routed_experts)
    assert answer.routed_experts_meta["num_experts"] == 16


def test_openai_client_reads_a_chat(kit, client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=9, extra_body={"return_token_ids": True}
    )
    prompt, choice = answer.prompt_token_ids, answer.choices[0]
    compare(kit, prompt, choice.token_ids, answer.prompt_routed_experts, choice.routed_experts)


@pytest.mark.parametrize("usage", [False, True])
def test_openai_client_reads_a_stream_of_chat(kit, client, usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    extra = {"return_token_ids": True}
    chunks = list(
        client.chat.completions.create(
            *(),
            model="tiny",
            messages=MESSAGES,
            max_tokens=9,
            stream=True,
            extra_body=extra,
            **options,
        )
    )
    prompt = chunks[0].prompt_token_ids
    choices = [c for chunk in chunks for c in chunk.choices]
    tokens = [t for c in choices for t in (getattr(c, "token_ids", None) or [])]
    (last,) = [chunk for chunk in chunks if "routed_experts_meta" in chunk.model_extra]
    rows = last.choices[0].routed_experts
    compare(kit, prompt, tokens, last.prompt_routed_experts, rows)
    assert (chunks[-1].usage is not None) == usage


def test_openai_client_gets_a_bad_request_error(client):
    with pytest.raises(openai.BadRequestError, match=r"must be in \[0, 25\], got 26"):
        client.completions.create(
            model="tiny", prompt=PROMPT, extra_body={"routed_experts_prompt_start": 26}
        )


def test_client_of_newer_vllm_reads_one_array_a_choice(kit):
    """0.22 and newer: `np.load` of `choices[0].routed_experts`, S - 1 rows, nothing else."""
    body = request("generate", PROMPT, routed_experts_layout="full")
    status, answer = kit.post(GENERATE, body)
    assert status == 200 and "prompt_routed_experts" not in answer
    choice = answer["choices"][0]
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert rows.shape == (len(PROMPT) + len(choice["token_ids"]) - 1, 6, 4)
    truth = kit.oracle.truth([*PROMPT, *choice["token_ids"]])
    check_rows(kit.oracle, truth, len(PROMPT), rows[:25], rows[25:])


def test_client_of_stock_021_reads_nested_lists(kit):
    """0.21: `np.array` of the lists, prompt rows on top, the others in each choice."""
    body = request("completions", PROMPT, routed_experts_encoding="list")
    status, answer = kit.post(COMPLETIONS, body)
    assert status == 200
    choice = answer["choices"][0]
    parts = (answer["prompt_routed_experts"], choice["routed_experts"])
    prompt_rows, rows = (np.array(part, dtype=np.uint8) for part in parts)
    truth = kit.oracle.truth([*PROMPT, *choice["token_ids"]])
    check_rows(kit.oracle, truth, len(PROMPT), prompt_rows, rows)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_stock_benchmark_of_vllm_runs_against_the_server(kit, tmp_path, backend):
    path = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    status, shown = run_vllm(
        *("bench", "serve", "--backend", backend, "--base-url", kit.url, "--endpoint", path),
        *("--model", "tiny", "--tokenizer", str(kit.model_dir), "--dataset-name", "random"),
        *("--random-input-len", "20", "--random-output-len", "10", "--num-prompts", "6"),
        "--ignore-eos",
        log_path=tmp_path / "log",
    )
    assert status == 0, shown[-2000:]
    (line,) = [s for s in shown.splitlines() if s.startswith("Successful requests:")]
    assert line.split()[-1] == "6", shown[-2000:]
    assert "Failed requests:                         0" in shown
