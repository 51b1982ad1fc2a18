"""Weights that change under running requests: rows by value, and which weights each is of."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server_fixture import (
    COMPLETIONS,
    ENDPOINTS,
    GENERATE,
    GENERATED,
    decode,
    read_answer,
    read_chunks,
    request,
    seeded_prompt,
    wait_for,
)

from vllm_r3.checks.rows import compare_rows, differing_cells
from vllm_r3.client import decode_answer
from vllm_r3.replay.experts_hook import Pass

LONG = {"max_tokens": 600, "ignore_eos": True}
KIND = "dense-between"
# Over 158,016 cells the engine and transformers agreed in all, the closest 3e-6 from a tie.
TIE = 1e-5


class Trainer:
    """Changes the weights of a server, and knows both sets."""

    def __init__(self, kit, models, oracles):
        self.kit = kit
        self.paths = [str(models(kind)) for kind in (KIND, f"{KIND}-other")]
        self.oracles = [oracles(kind) for kind in (KIND, f"{KIND}-other")]

    def name(self, version):
        status, answer = self.kit.post("/update_weight_version", {"new_version": version})
        assert (status, answer) == (200, {"success": True, "new_version": version})
        assert self.kit.get("/weight_info") == {"weight_version": version}

    def load(self, number):
        body = {"method": "reload_weights", "kwargs": {"weights_path": self.paths[number]}}
        assert self.kit.client.post("/collective_rpc", json=body).status_code == 200

    def reset(self, **params):
        assert self.kit.client.post("/reset_prefix_cache", params=params).status_code == 200

    def truth(self, tokens, first_new=None):
        """What the old weights choose, from row `first_new` on the new, which look back at keys
        and values of the old."""
        old, new = self.oracles
        if first_new is None:
            return old.truth(tokens)
        ids = np.array([tokens[:first_new]])
        past = old.model(old.model.dummy_inputs["input_ids"].new_tensor(ids)).past_key_values
        after = copy.copy(new)
        after.model = Continued(new.model, past)
        return joined(old.truth(tokens[: first_new + 1]), after.run(tokens[first_new:]))


def joined(*passes):
    names = "rows", "margins", "logits"
    return Pass(*(np.concatenate([getattr(p, name) for p in passes]) for name in names))


class Continued:
    """A model of transformers that goes on from keys and values."""

    def __init__(self, model, past):
        self.model, self.past, self.device = model, past, model.device

    def __call__(self, ids, use_cache):
        return self.model(ids, past_key_values=self.past)


@pytest.fixture
def trainer(kit, models, oracles):
    trainer = Trainer(kit, models, oracles)
    trainer.reset()
    trainer.name("v1")
    yield trainer
    trainer.load(0)
    trainer.reset()
    trainer.name("v3")
    kit.check(GENERATE, request("generate", seeded_prompt(1, 20)))


def ask(kit, path, body, stream):
    """The answer, its weight_version, and the whole parsed body or last chunk with rows."""
    if not stream:
        status, raw = kit.post(path, body)
        assert status == 200, raw
        return read_answer(raw), raw
    chunks = kit.chunks(path, body)
    (raw,) = [chunk for chunk in chunks if "routed_experts_meta" in chunk]
    assert not any("weight_version" in chunk for chunk in chunks if chunk is not raw)
    return read_chunks(chunks), raw


def update_under(kit, trainer, job_of, before_resume=lambda: None):
    """Start a request, change the weights when it has some tokens, return what it answers.

    Only if this process slept through all of the request's tokens, it is asked once more.
    """
    for _ in range(5):
        before = kit.metric(GENERATED)
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(job_of)
            wait_for(lambda: job.done() or kit.metric(GENERATED) > before + 20, "tokens")  # noqa: B023
            kit.pause("keep", clear_cache=False)
            trainer.load(1)
            trainer.name("v2")
            before_resume()
            kit.resume()
            answer, raw = job.result()
        if all(len(runs) == 2 for runs in all_runs(raw)):
            return answer, raw
        trainer.load(0)
        trainer.reset()
        trainer.name("v1")
    raise AssertionError("in 5 attempts no update came between two tokens of all choices")


def all_runs(raw):
    """The runs of versions of each choice."""
    first = raw["routed_experts_meta"]["weight_versions"]
    return [c.get("routed_experts_weight_versions", first) for c in raw["choices"]]


def assert_same(kit, rows, truth):
    """Rows are the oracle's, but in cells where its router ties within float32's rounding."""
    tied = truth.margins < TIE
    expected = np.where(tied[..., None], rows, truth.rows)
    compare_rows(rows, expected, kit.oracle.shape, margins_NL=truth.margins)


def rows_of(answer, choice):
    form = answer.meta["encoding"], answer.meta["dtype"]
    prompt_rows = answer.prompt_rows if choice.prompt_rows is None else choice.prompt_rows
    return np.concatenate([decode(value, *form) for value in (prompt_rows, choice.rows)])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_request_that_spans_an_update_says_at_which_row(kit, trainer, endpoint, stream):
    prompt = seeded_prompt(200 + len(endpoint) + stream, 40)
    body = request(endpoint, prompt, **LONG)
    answer, raw = update_under(kit, trainer, lambda: ask(kit, ENDPOINTS[endpoint], body, stream))
    choice = answer.choices[0]
    prompt = choice.prompt or answer.prompt or prompt
    (first, old), (first_new, new) = raw["routed_experts_meta"]["weight_versions"]
    assert (first, old, new, raw["weight_version"]) == (0, "v1", "v2", "v2")
    tokens = [*prompt, *choice.tokens]
    assert len(prompt) + 10 < first_new < len(tokens)
    rows = rows_of(answer, choice)
    assert_same(kit, rows, trainer.truth(tokens, first_new))
    assert differing_cells(rows, trainer.truth(tokens).rows)[first_new].any()
    if endpoint != "generate":
        return
    # The next turn finds what both wrote, in the cache.
    old_rows = kit.metric("routed_experts_old_rows_returned_total")
    again = request("generate", tokens, max_tokens=2)
    second, raw = ask(kit, GENERATE, again, False)
    assert raw["routed_experts_meta"]["weight_versions"] == [[0, "v1"], [first_new, "v2"]]
    cached = (len(tokens) - 1) // 16 * 16
    assert np.array_equal(rows_of(second, second.choices[0])[:cached], rows[:cached])
    wait_for(
        lambda: kit.metric("routed_experts_old_rows_returned_total") == old_rows + first_new,
        "rows of the old weights in the metrics",
    )
    start = len(tokens) - 1
    third = ask(kit, GENERATE, again | {"routed_experts_prompt_start": start}, False)[1]
    assert third["routed_experts_meta"]["weight_versions"] == [[start, "v2"]]
    (routes,) = decode_answer(raw, num_prompt=len(tokens))
    expected = ["v1"] * first_new + ["v2"] * (len(tokens) + 1 - first_new)
    assert list(routes.versions) == expected


def test_rows_computed_again_for_a_reset_keep_the_version_of_the_first_pass(kit, trainer):
    prompt = seeded_prompt(210, 50)
    body = request("generate", prompt, **LONG)
    answer, raw = update_under(
        kit,
        trainer,
        lambda: ask(kit, GENERATE, body, False),
        lambda: trainer.reset(reset_running_requests=True),
    )
    (_, old), (first_new, new) = raw["routed_experts_meta"]["weight_versions"]
    assert (old, new) == ("v1", "v2")
    tokens = [*prompt, *answer.choices[0].tokens]
    old, new = (oracle.truth(tokens) for oracle in trainer.oracles)
    parts = ((old, slice(first_new)), (new, slice(first_new, None)))
    truth = joined(*(Pass(p.rows[s], p.margins[s], p.logits[s]) for p, s in parts))
    assert_same(kit, rows_of(answer, answer.choices[0]), truth)
    # The cache holds the second pass.
    second = ask(kit, GENERATE, request("generate", tokens, max_tokens=1), False)[1]
    assert second["routed_experts_meta"]["weight_versions"] == [[0, "v2"]]


def test_choices_that_changed_at_other_rows_say_so(kit, trainer):
    prompts = [seeded_prompt(220, 30), seeded_prompt(221, 45)]
    body = request("completions", prompts[0], **LONG) | {"prompt": prompts}
    answer, raw = update_under(kit, trainer, lambda: ask(kit, COMPLETIONS, body, False))
    runs = all_runs(raw)
    assert "routed_experts_weight_versions" not in raw["choices"][0]
    for index, prompt in enumerate(prompts):
        (_, old), (first_new, new) = runs[index]
        assert (old, new) == ("v1", "v2")
        tokens = [*prompt, *answer.choices[index].tokens]
        rows = rows_of(answer, answer.choices[index])
        assert_same(kit, rows, trainer.truth(tokens, first_new))
    for routes, (_, (first_new, _)) in zip(decode_answer(raw), runs, strict=True):
        assert routes.versions is not None
        assert list(routes.versions).index("v2") == first_new


def test_weights_without_a_name_are_told_apart(kit, trainer):
    kit.check(GENERATE, request("generate", seeded_prompt(230, 20)))
    trainer.load(1)
    assert kit.get("/weight_info") == {"weight_version": "v1+1"}
    answer = kit.generate(seeded_prompt(230, 20), 3)
    assert answer["routed_experts_meta"]["weight_versions"] == [[0, "v1"], [16, "v1+1"]]
    assert answer["weight_version"] == "v1+1"


def test_an_answer_without_rows_has_no_version(kit):
    answer = kit.generate(seeded_prompt(1, 20), 3, return_routed_experts=False)
    assert "version" not in json.dumps(answer)


@pytest.mark.parametrize("body", [{}, {"new_version": 3}, {"new_version": None}])
def test_a_version_is_a_string(kit, body):
    status, answer = kit.post("/update_weight_version", body)
    assert status == 400 and "new_version" in json.dumps(answer)
