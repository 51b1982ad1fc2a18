# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A request that is preempted after it was scheduled leaves no empty cached blocks."""

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
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
CHUNK = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LAYER = dict(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
FULL = KVCacheGroupSpec(["full"], FullAttentionSpec(**LAYER))
SLIDING = KVCacheGroupSpec(["sliding"], SlidingWindowSpec(**LAYER, sliding_window=16))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return str(path)


def make_scheduler(
    model: str, groups: list[KVCacheGroupSpec], num_blocks: int, is_async: bool
) -> Scheduler:
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=128
        ),
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len=128,
            long_prefill_token_threshold=CHUNK,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy="priority",
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
    )
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    return (AsyncScheduler if is_async else Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(num_blocks, [], groups),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
    )


class Engine:
    """The engine's loop around a scheduler, with a KV cache that knows its tokens."""

    def __init__(self, scheduler: Scheduler, is_async: bool) -> None:
        init_none_hash(sha256)
        self.scheduler = scheduler
        self.num_in_flight = 2 if is_async else 1
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        # Request and position of what each slot holds, by (group, block, offset).
        self.kv_cache: dict[tuple[int, int, int], tuple[str, int]] = {}
        self.preempted: set[str] = set()

    def add(self, name: str, prompt: list[int], max_tokens: int, priority: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.scheduler.add_request(
            Request(name, prompt, params, None, priority=priority, block_hasher=hasher)
        )

    def step(self) -> None:
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.preempted |= scheduled.preempted_req_ids or set()
            self.in_flight.append((scheduled, self.execute(scheduled)))
        if (
            len(self.in_flight) >= self.num_in_flight
            or not self.scheduler.has_requests()
        ):
            self.scheduler.update_from_output(*self.in_flight.popleft())

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
        sampled = []
        for name, start in starts.items():
            stop = start + scheduled.num_scheduled_tokens[name]
            groups = self.scheduler.kv_cache_manager.get_block_ids(name)
            for group, blocks in enumerate(groups):
                for i in range(stop):
                    block, offset = blocks[i // BLOCK_SIZE], i % BLOCK_SIZE
                    if block == 0:
                        continue  # out of the sliding window
                    if i >= start:
                        self.kv_cache[group, block, offset] = name, i
                    assert self.kv_cache.get((group, block, offset)) == (name, i)
            request = self.scheduler.requests[name]
            sampled.append([7] if stop >= request.num_tokens else [])
        return ModelRunnerOutput(
            req_ids=list(starts),
            req_id_to_index={name: i for i, name in enumerate(starts)},
            sampled_token_ids=sampled,
        )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("groups", "num_blocks", "num_urgent_tokens"),
    [
        ([FULL], 13, 4),
        ([FULL], 14, 8),
        ([FULL], 15, 12),
        ([FULL, SLIDING], 24, 8),
        ([FULL, SLIDING], 26, 12),
    ],
)
def test_every_cached_block_that_is_hit_has_been_filled(
    model: str,
    groups: list[KVCacheGroupSpec],
    num_blocks: int,
    num_urgent_tokens: int,
    is_async: bool,
):
    scheduler = make_scheduler(model, groups, num_blocks, is_async)
    engine = Engine(scheduler, is_async)
    engine.add("victim", list(range(44)), max_tokens=3, priority=3)
    engine.step()
    # Its first new block is one of those that the victim was just given.
    urgent = list(range(100, 100 + num_urgent_tokens))
    engine.add("urgent", urgent, max_tokens=6, priority=0)
    for _ in range(100):
        if not scheduler.has_unfinished_requests():
            break
        engine.step()
    assert not scheduler.has_unfinished_requests()
    assert "victim" in engine.preempted
