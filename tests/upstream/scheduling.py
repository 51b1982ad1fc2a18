# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real scheduler, KV-cache manager and block pool, driven by a worker without a model.

The worker does what a model runner does with a step, token ids and block tables included,
and keeps a KV cache of rows: each step must find there what its requests have computed. A row says which token it is of, at which position, in which
layer and in which step, so that neither a shift, nor a neighbour, nor another pass can hide.
What the KV cache held when a token was sampled is what led to it: of the tokens that reach
the caller, the first that depends on a row says of which pass the row must be.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
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
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.answered_aborts import abort_and_answer
from vllm.v1.engine.routed_experts import hand_out_rows_of_step
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.routed_experts import RoutedExpertsInfo, StepRoutedExperts
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.weight_versions import ChoiceVersions, WeightVersions

BLOCK_SIZE = 4
MAX_MODEL_LEN = 128
NUM_LAYERS = 3
TOP_K = 4
INFO = RoutedExpertsInfo(
    num_layers=NUM_LAYERS, moe_layers=[0, 1, 2], num_experts=30000, top_k=TOP_K
)
EOS = 5
REJECTED = 29999


def row(token_id: int, position: int, step: int) -> np.ndarray:
    """Row of one token in one pass: no two of them are equal in any layer."""
    layers = [[token_id, position, 1000 * layer, step] for layer in range(NUM_LAYERS)]
    return np.array(layers, dtype=INFO.dtype)


def next_token(token_ids: Sequence[int]) -> int:
    """What the model would sample: depends on every token before it, never EOS."""
    return 100 + (len(token_ids) * 7 + sum(token_ids) * 13) % 899


@dataclass
class Runner:
    """Stands in for a worker: takes a step, answers with tokens and rows.

    Args:
        windows: Tokens that attention looks back to, by KV-cache group.
        group: Group whose slots the rows go to.
        sample: What the model samples after a list of tokens.
        num_accepted: Drafts of a request that are right in a step, by (request id, step).
    """

    windows: list[int]
    group: int = 0
    sample: Callable[[Sequence[int]], int] = next_token
    num_accepted: Callable[[str, int], int] = lambda request_id, step: 0
    loses: Callable[[str, int, int], bool] = lambda request_id, position, step: False

    tokens: dict[str, list[int]] = field(default_factory=dict)
    # Blocks of each request by group.
    block_tables: dict[str, list[list[int]]] = field(default_factory=dict)
    # First token and number of tokens of each pass of a request.
    passes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    # Rows that the KV cache holds, by group and slot.
    kv_cache: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    # Rows, from token 0, that led to what the last step sampled, by request.
    led_to: dict[str, list[np.ndarray]] = field(default_factory=dict)
    step: int = 0

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self.step += 1
        self._update_states(scheduled)
        slots: list[int] = []
        rows: list[np.ndarray] = []
        sampled: list[list[int]] = []
        # A runner's batch has an order of its own.
        request_ids = sorted(scheduled.num_scheduled_tokens, reverse=True)
        starts = self._starts(scheduled)
        for request_id in request_ids:
            num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
            num_tokens = scheduled.num_scheduled_tokens[request_id]
            sampled.append(
                self._run(
                    request_id, starts[request_id], num_tokens, num_drafts, slots, rows
                )
            )
        # Only now: a hit may be on blocks that this very step has filled.
        self.led_to = {
            request_id: self._cached_rows(request_id)
            for request_id, token_ids in zip(request_ids, sampled, strict=True)
            if token_ids
        }
        for request_id in request_ids:
            self._check_hits(request_id, starts[request_id])
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )
        if request_ids:
            output.routed_experts = StepRoutedExperts(
                np.array(slots, dtype=np.int64), np.stack(rows)
            )
        return output

    def _update_states(self, scheduled: SchedulerOutput) -> None:
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.tokens[new.req_id] = list(tokens)
            self.block_tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = scheduled.scheduled_cached_reqs
        for request_id, new_blocks in zip(
            cached.req_ids, cached.new_block_ids, strict=True
        ):
            if request_id in cached.all_token_ids:
                self.tokens[request_id] = list(cached.all_token_ids[request_id])
            tables = self.block_tables[request_id]
            for group, blocks in enumerate(new_blocks or ()):
                is_resumed = request_id in cached.resumed_req_ids
                tables[group] = [*(() if is_resumed else tables[group]), *blocks]

    def _starts(self, scheduled: SchedulerOutput) -> dict[str, int]:
        cached = scheduled.scheduled_cached_reqs
        starts = {
            new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs
        }
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        # The scheduler may count drafts that the runner has rejected meanwhile.
        return {r: min(start, len(self.tokens[r]) - 1) for r, start in starts.items()}

    def _run(
        self,
        request_id: str,
        start: int,
        num_tokens: int,
        num_drafts: int,
        slots: list[int],
        rows: list[np.ndarray],
    ) -> list[int]:
        tokens = self.tokens[request_id]
        num_right = min(self.num_accepted(request_id, self.step), num_drafts)
        sampled: list[int] = []
        if start + num_tokens - num_drafts == len(tokens):
            sampled = [self.sample(tokens)]
            while len(sampled) <= num_right:
                sampled.append(self.sample(tokens + sampled))
        self.passes.setdefault(request_id, []).append((start, num_tokens))
        inputs = tokens + sampled[:num_right] + [REJECTED] * (num_drafts - num_right)
        for position in range(start, start + num_tokens):
            one = row(inputs[position], position, self.step)
            for group in range(len(self.block_tables[request_id])):
                self.kv_cache[group, self._slot(request_id, position, group)] = one
            slot = self._slot(request_id, position, self.group)
            if self.loses(request_id, position, self.step):
                slot = -1
            slots.append(slot)
            rows.append(one)
        tokens += sampled
        return sampled

    def _cached_rows(self, request_id: str) -> list[np.ndarray]:
        return [
            self.kv_cache[self.group, self._slot(request_id, position, self.group)]
            for position in range(len(self.tokens[request_id]) - 1)
        ]

    def _check_hits(self, request_id: str, stop: int) -> None:
        for group, window in enumerate(self.windows):
            for position in range(max(0, stop + 1 - window), stop):
                found = self.kv_cache[group, self._slot(request_id, position, group)]
                expected = [self.tokens[request_id][position], position]
                assert found[0, :2].tolist() == expected, f"{request_id}: not filled"

    def _slot(self, request_id: str, position: int, group: int) -> int:
        block = self.block_tables[request_id][group][position // BLOCK_SIZE]
        return block * BLOCK_SIZE + position % BLOCK_SIZE

    def blocks(self, request_id: str) -> set[int]:
        """Blocks that a request has had since it last began."""
        return set(self.block_tables[request_id][self.group])


@dataclass
class Answer:
    """What the front end got for one request, in the order in which it came."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    rows: np.ndarray | None = None
    finish_reason: str | None = None
    error: str | None = None
    # What came of the weights behind the rows.
    versions: ChoiceVersions = field(default_factory=lambda: ChoiceVersions(None, 0))
    # What the weights were called then, by number.
    version_names: list[str] = field(default_factory=list)
    # Whether rows come with every token.
    is_delta: bool = False
    # Then, number and name of each row's weights when its run was told.
    told: list[tuple[int, str]] = field(default_factory=list)
    # Rows of the passes that led to `token_ids`, of all tokens but the last.
    true_rows: list[np.ndarray] = field(default_factory=list)

    def add(self, output: EngineCoreOutput, led_to: list[np.ndarray]) -> None:
        self.token_ids += output.new_token_ids
        stop = len(self.prompt) + len(self.token_ids) - 1
        self.true_rows += led_to[len(self.true_rows) : stop]
        assert self.finish_reason is None, "an output after the last one"
        rows, self.error = output.routed_experts, output.error
        if self.is_delta and rows is not None:
            held = rows[:0] if self.rows is None else self.rows
            self.rows = np.concatenate([held, rows])
            assert len(self.rows) == stop or output.error
        else:
            self.rows = rows
        self.versions.add(output.weight_versions)
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)


class Engine:
    """The loop of the engine core around a scheduler and a `Runner`.

    Args:
        scheduler: The scheduler, with routed experts on.
        runner: The worker.
        num_drafts: Draft tokens that every decoding request proposes.
        depth: Steps that are launched before the first is collected. Two is what async
            scheduling does, and pipeline parallelism without it.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, num_drafts: int, depth: int
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.is_async = isinstance(scheduler, AsyncScheduler)
        self.num_drafts = num_drafts
        self.depth = depth
        self.answers: dict[str, Answer] = {}
        self.in_flight: deque[
            tuple[SchedulerOutput, ModelRunnerOutput, dict[str, list[np.ndarray]]]
        ] = deque()
        self.steps: list[SchedulerOutput] = []
        # Number of the weights that each step was launched with.
        self.launched_with: list[int] = []
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

    @property
    def table(self):
        return self.scheduler.routed_experts_manager.table

    @property
    def weight_versions(self) -> WeightVersions:
        manager = self.scheduler.routed_experts_manager
        return manager.weight_versions if manager else WeightVersions()

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(
        self, request_id: str, prompt: list[int], *, priority: int = 0, **params
    ) -> None:
        params.setdefault("max_tokens", 8)
        sampling_params = SamplingParams(temperature=0.0, **params)
        sampling_params.update_from_generation_config({}, EOS)
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=sampling_params,
                pooling_params=None,
                priority=priority,
                arrival_time=float(len(self.answers)),
                block_hasher=self._hasher,
            )
        )
        self.answers[request_id] = Answer(
            list(prompt), is_delta=sampling_params.routed_experts_stream == "delta"
        )

    def launch(self) -> SchedulerOutput:
        """Schedule a step and run it, without looking at what came of it."""
        self.launched_with.append(self.weight_versions.number)
        scheduled = self.scheduler.schedule()
        self.steps.append(scheduled)
        output = self.runner.execute(scheduled)
        self.in_flight.append((scheduled, output, self.runner.led_to))
        return scheduled

    def collect(self) -> None:
        """Hand the oldest launched step's output to the scheduler."""
        scheduled, output, led_to = self.in_flight.popleft()
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            hand_out_rows_of_step(outputs)
            for one in outputs.outputs:
                self._take(one, led_to.get(one.request_id, []))
        if self.num_drafts and not self.is_async:
            self._propose(output)
        if output.routed_experts is not None:
            # The runner uses its memory again.
            output.routed_experts.slots.fill(0)
            output.routed_experts.rows.fill(-1)

    def _take(self, output: EngineCoreOutput, led_to: list[np.ndarray]) -> None:
        answer = self.answers[output.request_id]
        answer.add(output, led_to)
        numbers = range(self.weight_versions.number + 1)
        answer.version_names = [self.weight_versions.name(n) for n in numbers]
        if not answer.is_delta or output.routed_experts is None:
            return
        for step in output.routed_experts[:, 0, 3].tolist():
            number = self.launched_with[step - 1]
            goes_on = answer.told and answer.told[-1][0] == number
            name = answer.told[-1][1] if goes_on else answer.version_names[number]
            answer.told.append((number, name))

    def _propose(self, output: ModelRunnerOutput) -> None:
        drafts = [
            [REJECTED] * self.num_drafts if s else [] for s in output.sampled_token_ids
        ]
        self.scheduler.update_draft_token_ids(
            DraftTokenIds(list(output.req_ids), drafts)
        )

    def step(self) -> None:
        """One turn of the engine's loop."""
        if len(self.in_flight) < self.depth and self.scheduler.has_requests():
            self.launch()
        if len(self.in_flight) == self.depth or not self.scheduler.has_requests():
            self.collect()

    def run(self, max_steps: int = 300) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def drain(self) -> None:
        """Collect what is in flight, without scheduling more."""
        while self.in_flight:
            self.collect()

    def abort(self, *request_ids: str) -> None:
        """Abort requests of clients that have gone."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def abort_and_answer(self, *request_ids: str) -> None:
        """Abort requests, all by default, and take the answers."""
        for outputs in abort_and_answer(
            self.scheduler, list(request_ids) or None
        ).values():
            assert outputs.finished_requests == {o.request_id for o in outputs.outputs}
            for one in outputs.outputs:
                self._take(one, [])

    def reset(self) -> None:
        """Reset the prefix cache, as a change of weights does."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def assert_nothing_is_kept(self) -> None:
        """No request is left, and nothing of one beside the table."""
        manager = self.scheduler.routed_experts_manager
        assert (manager._saved, manager._in_flight) == ({}, {})
        assert (manager._saved_versions, manager._versions_told) == ({}, {})
        assert (manager._next_row, manager._slots_to_send) == ({}, {})
        assert self.num_free_blocks == self.table.num_blocks - 1

    def num_preemptions(self, request_id: str) -> int:
        return sum(request_id in (s.preempted_req_ids or ()) for s in self.steps)

    def expected(self, request_id: str, start: int = 0) -> np.ndarray:
        """Rows [start, S - 1), each of the pass that led to the caller's tokens."""
        rows = self.answers[request_id].true_rows[start:]
        return np.array(rows, dtype=INFO.dtype).reshape(-1, NUM_LAYERS, TOP_K)

    def assert_tokens(self, request_id: str) -> None:
        """The answer is complete and has no token but what the model samples."""
        answer = self.answers[request_id]
        assert answer.finish_reason == "length"
        for i, token_id in enumerate(answer.token_ids):
            assert token_id == next_token(answer.prompt + answer.token_ids[:i])

    def assert_all_rows(self) -> None:
        for request_id in self.answers:
            self.assert_rows(request_id)

    def assert_rows(self, request_id: str, start: int = 0) -> None:
        """The answer has one row for each token but the last, each of the right pass."""
        answer = self.answers[request_id]
        assert answer.error is None, answer.error
        rows = answer.rows
        assert rows is not None, f"{request_id}: no rows"
        assert rows.dtype == INFO.dtype
        token_ids = (answer.prompt + answer.token_ids)[start:-1]
        assert rows[:, 0, 0].tolist() == token_ids
        assert rows[:, 0, 1].tolist() == list(range(start, start + len(token_ids)))
        np.testing.assert_array_equal(rows, self.expected(request_id, start))
        runs = answer.versions.runs(start, start + len(rows))
        assert [first for first, _ in runs[:1]] == [start] * (len(rows) > 0)
        firsts = [first for first, _ in runs] + [start + len(rows)]
        lengths = np.diff(firsts)
        assert (lengths > 0).all()
        names = np.repeat([name for _, name in runs], lengths).tolist()
        if answer.is_delta:
            assert names == [name for _, name in answer.told[: len(rows)]]
            return
        assert names == [
            answer.version_names[self.launched_with[step - 1]]
            for step in rows[:, 0, 3].tolist()
        ]


ATTENTION = {
    "block_size": BLOCK_SIZE,
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": torch.float32,
}
FULL = KVCacheGroupSpec(["full"], FullAttentionSpec(**ATTENTION))
SLIDING = KVCacheGroupSpec(
    ["sliding"], SlidingWindowSpec(sliding_window=4 * BLOCK_SIZE, **ATTENTION)
)


def make_engine(
    model: str,
    num_blocks: int,
    groups: Sequence[KVCacheGroupSpec] = (FULL,),
    *,
    is_async: bool = False,
    num_drafts: int = 0,
    depth: int | None = None,
    group: int = 0,
    max_num_batched_tokens: int = 64,
    policy: str = "fcfs",
    log_stats: bool = True,
    returns_rows: bool = True,
    kv_transfer_config: KVTransferConfig | None = None,
    page: int = 0,
    **scheduler_options,
) -> Engine:
    """Build an engine around the real scheduler.

    Args:
        model: Directory of a model's config.
        num_blocks: Blocks for requests.
        groups: KV-cache groups that share them.
        group: The one whose slots the rows go by.
        returns_rows: Whether routed experts are on.
        kv_transfer_config: The connector, if any.
        page: Bytes of a block, for a connector that counts them.
        scheduler_options: More of `SchedulerConfig`.
    """
    # One more: the pool keeps a null block for itself.
    names = [name for group in groups for name in group.layer_names]
    tensors = [KVCacheTensor((num_blocks + 1) * page, names)] if page else []
    kv_cache_config = KVCacheConfig(num_blocks + 1, tensors, list(groups))
    model_config = ModelConfig(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
    )
    vllm_config = VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=policy,
            **scheduler_options,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        kv_transfer_config=kv_transfer_config,
    )
    vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    init_none_hash(sha256)
    scheduler = (AsyncScheduler if is_async else Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=log_stats,
    )
    if num_drafts:
        scheduler.num_spec_tokens = scheduler.num_lookahead_tokens = num_drafts
        scheduler._spec_token_placeholders = [-1] * num_drafts
    if returns_rows:
        scheduler.init_routed_experts(INFO)
    windows = [group.kv_cache_spec.sliding_window or MAX_MODEL_LEN for group in groups]
    return Engine(
        scheduler, Runner(windows, group), num_drafts, depth or (2 if is_async else 1)
    )
