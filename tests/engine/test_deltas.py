"""routed_experts_stream "delta" in process: rows with every output, by value.

After each output with tokens the rows so far are those of all tokens but the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import seeded_prompts

ASYNC_AND_SYNC = pytest.mark.parametrize(
    "running", ["moe", "moe-async"], indirect=True, scope="module"
)


@dataclass
class Stream:
    """One choice as its outputs have made it so far."""

    token_ids: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    prompt_rows: np.ndarray | None = None
    text: str = ""
    num_outputs: int = 0
    finish_reason: str | None = None
    index: int = 0

    @property
    def routed_experts(self) -> np.ndarray:
        return np.concatenate(self.rows)


def streams(running: Any, prompts: list[list[int]], **sampling: Any) -> list[dict[int, Stream]]:
    """Run requests at once; hold each output's rows against its tokens as it comes."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = {"temperature": 0.0, "max_tokens": 16} | sampling
    engine, found = running.llm.llm_engine, [{} for _ in prompts]
    for at, prompt in enumerate(prompts):
        kind = RequestOutputKind.DELTA
        one = SamplingParams(**params, output_kind=kind, routed_experts_stream="delta")
        engine.add_request(str(at), {"prompt_token_ids": prompt}, one)
    while engine.has_unfinished_requests():
        for output in engine.step():
            at = int(output.request_id)
            take_in(found[at], output, len(prompts[at]), one)
    return found


def take_in(choices: dict[int, Stream], output: Any, num_prompt: int, params: Any) -> None:
    start, is_full = params.routed_experts_prompt_start, params.routed_experts_layout == "full"
    for part in output.outputs:
        stream = choices.setdefault(part.index, Stream(index=part.index))
        if not stream.rows and not is_full:
            assert output.prompt_routed_experts.shape[0] == num_prompt - start
            stream.prompt_rows = output.prompt_routed_experts
        stream.num_outputs += bool(part.token_ids)
        stream.token_ids += part.token_ids
        stream.text += part.text
        stream.finish_reason = part.finish_reason
        if part.routed_experts is not None:
            stream.rows.append(part.routed_experts)
        num_rows = sum(map(len, stream.rows)) - (num_prompt - start if is_full else 0)
        assert num_rows == len(stream.token_ids) - 1


def check(running: Any, prompts: list[list[int]], **sampling: Any) -> list[dict[int, Stream]]:
    """Compare every row of every choice with the oracle."""
    found = streams(running, prompts, **sampling)
    for prompt, choices in zip(prompts, found, strict=True):
        for stream in choices.values():
            assert stream.finish_reason is not None
            output = SimpleNamespace(outputs=[stream], prompt_routed_experts=stream.prompt_rows)
            running.compare(prompt, output, **sampling)
    assert set(running.leftovers().values()) == {0}, running.leftovers()
    return found


@ASYNC_AND_SYNC
@pytest.mark.parametrize("layout", ["split", "full"])
def test_every_output_has_the_rows_of_its_tokens(running, layout):
    prompts = seeded_prompts(71, [1, 15, 16, 17, 33, 90, 120])
    found = check(running, prompts, max_tokens=40, routed_experts_layout=layout)
    assert all(choices[0].num_outputs == 40 for choices in found)
    ended = running.generate(prompts, max_tokens=40, routed_experts_layout=layout)
    for choices, output in zip(found, ended, strict=True):
        assert choices[0].routed_experts.tobytes() == output.outputs[0].routed_experts.tobytes()
    check(running, prompts, max_tokens=1, routed_experts_layout=layout)


@ASYNC_AND_SYNC
@pytest.mark.parametrize("layout", ["split", "full"])
def test_rows_sent_before_a_preemption_are_not_sent_again(running, layout):
    with running.few_blocks(23) as preempted:
        prompts = seeded_prompts(72, [60, 61, 62, 63, 64, 65])
        check(running, prompts, max_tokens=60, routed_experts_layout=layout)
        assert len(preempted) >= 2, preempted


@ASYNC_AND_SYNC
@pytest.mark.parametrize("layout", ["split", "full"])
def test_choices_start_and_stop_on_their_own(running, layout):
    sampling = dict(n=3, temperature=1.0, routed_experts_layout=layout)
    for choices in check(running, seeded_prompts(73, [45, 50]), max_tokens=30, **sampling):
        assert sorted(choices) == [0, 1, 2]


@ASYNC_AND_SYNC
def test_stop_string_ends_at_its_last_token(running):
    (prompt,) = seeded_prompts(74, [33])
    (free,) = running.generate([prompt], max_tokens=30)
    word = running.llm.get_tokenizer().decode(list(free.outputs[0].token_ids)[17:19])
    (choices,) = check(running, [prompt], max_tokens=30, stop=[word])
    assert choices[0].finish_reason == "stop" and len(choices[0].token_ids) < 30


@ASYNC_AND_SYNC
def test_start_and_stream_interval(running, monkeypatch):
    monkeypatch.setattr(running.llm.llm_engine.output_processor, "stream_interval", 7)
    for start in (0, 32, 33):
        (prompt,) = seeded_prompts(75, [33])
        (choices,) = check(running, [prompt], max_tokens=30, routed_experts_prompt_start=start)
        assert choices[0].num_outputs == 6


@pytest.mark.parametrize("running", ["qwen2-ngram"], indirect=True, scope="module")
def test_several_tokens_a_step(running):
    prompts = [p * 3 for p in seeded_prompts(76, [12, 20, 28])]
    found = check(running, prompts, max_tokens=60)
    assert any(choices[0].num_outputs < 60 for choices in found)
    with running.few_blocks(23):
        check(running, seeded_prompts(77, [60, 61, 62, 63, 64, 65]), max_tokens=60)


@ASYNC_AND_SYNC
def test_only_deltas_can_have_them(running):
    with pytest.raises(ValueError, match="routed_experts_stream is 'delta', which only streams"):
        running.generate([[1, 2]], routed_experts_stream="delta")
