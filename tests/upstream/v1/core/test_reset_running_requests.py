# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""reset_prefix_cache(reset_running_requests=True) loses and repeats no token."""

import json
from collections import deque
from pathlib import Path

import pytest
import torch

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
MAX_MODEL_LEN = 128
MAX_TOKENS = 12
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def make_scheduler(
    model: str, is_async: bool, num_drafts: int, max_num_batched_tokens: int
) -> Scheduler:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    speculative_config = None
    if num_drafts:
        speculative_config = SpeculativeConfig(
            model="ngram", num_speculative_tokens=num_drafts
        )
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
        ),
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
        speculative_config=speculative_config,
    )
    vllm_config.cache_config.num_gpu_blocks = 65
    return (AsyncScheduler if is_async else Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(65, [], [KVCacheGroupSpec(["full"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
    )


class Engine:
    """The engine's loop around a scheduler; its worker samples 1000 + i at index i.

    Args:
        num_accepted: Drafts of each step that turn out right.
    """

    def __init__(
        self,
        model: str,
        is_async: bool = True,
        num_drafts: int = 0,
        num_accepted: int = 0,
        max_num_batched_tokens: int = 64,
    ) -> None:
        self.scheduler = make_scheduler(
            model, is_async, num_drafts, max_num_batched_tokens
        )
        self.num_in_flight = 2 if is_async else 1
        self.num_drafts = 0 if is_async else num_drafts
        self.num_accepted = num_accepted
        self.requests: list[Request] = []
        # Tokens of each request that the worker knows of.
        self.num_tokens: dict[str, int] = {}
        # First token and number of tokens of each step of a request.
        self.passes: dict[str, list[tuple[int, int]]] = {}
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, name: str, num_prompt_tokens: int) -> None:
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        request = Request(name, list(range(num_prompt_tokens)), params, None)
        self.requests.append(request)
        self.passes[name] = []
        self.scheduler.add_request(request)

    def launch(self) -> None:
        scheduled = self.scheduler.schedule()
        self.in_flight.append((scheduled, self._execute(scheduled)))

    def collect(self) -> None:
        scheduled, output = self.in_flight.popleft()
        self.scheduler.update_from_output(scheduled, output)
        if self.num_drafts:
            drafts = [
                [0] * self.num_drafts if s else [] for s in output.sampled_token_ids
            ]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(list(output.req_ids), drafts)
            )

    def step(self) -> None:
        if self.scheduler.has_requests():
            self.launch()
        if (
            len(self.in_flight) >= self.num_in_flight
            or not self.scheduler.has_requests()
        ):
            self.collect()

    def run(self) -> None:
        for _ in range(100):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("not done after 100 steps")

    def reset(self) -> None:
        assert self.scheduler.running
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert not self.scheduler.running

    def assert_answers(self) -> None:
        for request in self.requests:
            first = 1000 + request.num_prompt_tokens
            assert list(request.output_token_ids) == list(
                range(first, first + MAX_TOKENS)
            )

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        starts = {}
        for new in scheduled.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self.num_tokens[new.req_id] = len(new.prompt_token_ids)
        cached = scheduled.scheduled_cached_reqs
        for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            starts[name] = start
            if name in cached.resumed_req_ids:
                self.num_tokens[name] = len(cached.all_token_ids[name])
        sampled = [
            self._sample(scheduled, name, start) for name, start in starts.items()
        ]
        return ModelRunnerOutput(
            req_ids=list(starts),
            req_id_to_index={name: i for i, name in enumerate(starts)},
            sampled_token_ids=sampled,
        )

    def _sample(self, scheduled: SchedulerOutput, name: str, start: int) -> list[int]:
        num_scheduled = scheduled.num_scheduled_tokens[name]
        num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
        known = self.num_tokens[name]
        # The scheduler may count drafts that the worker has rejected meanwhile.
        start = min(start, known - 1)
        self.passes[name].append((start, num_scheduled))
        stop = start + num_scheduled - num_drafts
        assert stop <= known
        if stop < known:
            return []
        num_sampled = 1 + min(self.num_accepted, num_drafts)
        self.num_tokens[name] += num_sampled
        return list(range(1000 + known, 1000 + known + num_sampled))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_steps", [2, 4])
def test_first_token_after_a_pause_is_kept(model: str, is_async: bool, num_steps: int):
    engine = Engine(model, is_async)
    engine.add("a", 11)
    engine.add("b", 3)
    for _ in range(num_steps):
        engine.step()
    # A paused engine has no step in flight, as /pause?mode=keep waits for it.
    while engine.in_flight:
        engine.collect()
    engine.reset()
    engine.run()
    engine.assert_answers()


def test_token_in_flight_is_sampled_again_and_returned_once(model: str):
    engine = Engine(model)
    engine.add("a", 11)
    engine.add("b", 3)
    for _ in range(3):
        engine.step()
    assert engine.in_flight
    engine.reset()
    engine.run()
    engine.assert_answers()


def test_reset_between_the_chunks_of_a_prompt_loses_no_token(model: str):
    engine = Engine(model, max_num_batched_tokens=16)
    engine.add("a", 45)
    engine.step()
    engine.step()
    # The step in flight ends before the prompt does and samples nothing.
    assert engine.passes["a"] == [(0, 16), (16, 16)]
    engine.reset()
    engine.run()
    engine.assert_answers()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_accepted", [0, 1, 3])
def test_rejected_drafts_of_a_discarded_step_are_not_taken_off(
    model: str, is_async: bool, num_accepted: int
):
    engine = Engine(model, is_async, num_drafts=3, num_accepted=num_accepted)
    engine.add("a", 11)
    for _ in range(3):
        engine.step()
    passes = engine.passes["a"]
    assert passes[-1][1] == 4
    assert bool(engine.in_flight) is is_async
    engine.reset()
    del passes[:]
    engine.run()
    engine.assert_answers()
    # What was computed after the reset is not computed once more.
    (start, num_resumed), *others = passes
    assert start == 0
    assert all(first >= num_resumed for first, _ in others)
