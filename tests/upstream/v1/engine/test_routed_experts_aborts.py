# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests that the server ends early and still answers carry routed experts."""

import asyncio
import json
import queue
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
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
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.routed_experts import RoutedExpertsInfo, StepRoutedExperts
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
MAX_MODEL_LEN = 128
PROMPT = list(range(10, 21))
INFO = RoutedExpertsInfo(num_layers=2, moe_layers=[0, 1], num_experts=30000, top_k=2)
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def make_rows(name: str, stop: int) -> np.ndarray:
    """Rows [0, stop) of a request: no two ids of one column are equal."""
    position = np.arange(stop)[:, None, None]
    cell = 500 * np.arange(4).reshape(INFO.row_shape)
    return (2000 * "abcd".index(name) + cell + position).astype(INFO.dtype)


class Engine:
    """A scheduler that runs one step ahead, and a worker without a model.

    Args:
        lost: Positions of request "a" whose rows never arrive.
    """

    def __init__(self, model: str, lost: tuple[int, ...] = ()) -> None:
        self.lost = lost
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, EngineCoreOutput] = {}
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
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
                max_num_batched_tokens=64,
                max_model_len=MAX_MODEL_LEN,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(
                block_size=BLOCK_SIZE, enable_prefix_caching=False
            ),
        )
        vllm_config.cache_config.num_gpu_blocks = 65
        self.scheduler = AsyncScheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(65, [], [KVCacheGroupSpec(["full"], spec)]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK_SIZE,
        )
        self.scheduler.init_routed_experts(INFO)

    def add(self, name: str, **params) -> None:
        sampling_params = SamplingParams(max_tokens=9, **params)
        sampling_params.update_from_generation_config({}, eos_token_id=5)
        self.tokens[name] = []
        prompt = PROMPT["abcd".index(name) :]
        self.scheduler.add_request(Request(name, prompt, sampling_params, None))

    def step(self) -> None:
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.in_flight.append((scheduled, self._execute(scheduled)))
        if len(self.in_flight) > 1 or not self.scheduler.has_requests():
            self.collect()

    def collect(self) -> None:
        for outputs in self.scheduler.update_from_output(
            *self.in_flight.popleft()
        ).values():
            for output in outputs.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                self.outputs[output.request_id] = output

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        slots, rows, sampled = [], [], []
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            stop = self.scheduler.requests[name].num_computed_tokens
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
            for position in range(stop - num_tokens, stop):
                slot = blocks[position // BLOCK_SIZE] * BLOCK_SIZE
                is_lost = name == "a" and position in self.lost
                slots.append(-1 if is_lost else slot + position % BLOCK_SIZE)
            rows.append(make_rows(name, stop)[stop - num_tokens :])
            sampled.append([100 + stop])
        output = ModelRunnerOutput(
            req_ids=list(scheduled.num_scheduled_tokens),
            req_id_to_index={
                name: i for i, name in enumerate(scheduled.num_scheduled_tokens)
            },
            sampled_token_ids=sampled,
        )
        if rows:
            output.routed_experts = StepRoutedExperts(
                np.array(slots, dtype=np.int64), np.concatenate(rows)
            )
        return output

    def expected(self, name: str) -> np.ndarray:
        """Rows of all tokens that a client holds but the last."""
        num_prompt_tokens = len(PROMPT) - "abcd".index(name)
        return make_rows(name, num_prompt_tokens + len(self.tokens[name]) - 1)


class Core(EngineCoreProc):
    """An engine core of a scheduler and an output queue, without a process."""

    def __init__(self, engine: Engine) -> None:
        self.scheduler = engine.scheduler
        self.output_queue = queue.Queue()
        self.vllm_config = SimpleNamespace(shutdown_timeout=0)

    def has_work(self) -> bool:
        return False

    def _reset_caches(self, *args, **kwargs) -> None:
        pass

    def answers(self) -> dict[str, EngineCoreOutput]:
        """Everything that was sent, by request; nobody is answered twice."""
        answers: dict[str, EngineCoreOutput] = {}
        while not self.output_queue.empty():
            _, outputs = self.output_queue.get()
            for output in outputs.outputs:
                assert output.request_id in outputs.finished_requests
                assert output.request_id not in answers
                answers[output.request_id] = output
        return answers


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def make_engine(model: str, lost: tuple[int, ...] = ()) -> Engine:
    """Three requests that have three tokens each, and one that waits."""
    engine = Engine(model, lost)
    engine.add("a")
    engine.add("b", stop=["never"], detokenize=True)
    engine.add("c", return_routed_experts=False)
    for _ in range(4):
        engine.step()
    engine.add("d")
    assert [len(engine.tokens[name]) for name in "abcd"] == [3, 3, 3, 0]
    return engine


def assert_all_answered(engine: Engine, core: Core) -> None:
    answers = core.answers()
    assert set(answers) == set("abcd")
    for output in answers.values():
        assert output.finish_reason == FinishReason.ABORT
        assert output.new_token_ids == []
        assert output.error is None
    np.testing.assert_array_equal(answers["a"].routed_experts, engine.expected("a"))
    # The front end, which looks for stop strings, has had the rows of "b".
    assert len(answers["b"].routed_experts) == 0
    assert answers["c"].routed_experts is None
    assert answers["d"].routed_experts is None
    assert not engine.scheduler.requests


def test_abort_of_all_answers_all_with_the_rows_that_are_still_to_come(model: str):
    engine = make_engine(model)
    core = Core(engine)
    core.abort_and_answer()
    assert_all_answered(engine, core)
    # The step in flight comes back for nobody.
    engine.collect()
    assert [len(engine.tokens[name]) for name in "abcd"] == [3, 3, 3, 0]


def test_paused_engine_that_aborts_answers_with_rows(model: str):
    engine = make_engine(model)
    core = Core(engine)
    assert core.pause_scheduler("abort") is None
    assert_all_answered(engine, core)


def test_engine_that_shuts_down_answers_with_rows(model: str):
    engine = make_engine(model)
    core = Core(engine)
    core.shutdown_state = EngineShutdownState.REQUESTED
    core._handle_shutdown()
    assert_all_answered(engine, core)


def test_abort_of_some_leaves_the_others_alone(model: str):
    engine = make_engine(model)
    core = Core(engine)
    core.abort_and_answer(["a", "unknown"])
    assert set(core.answers()) == {"a"}
    assert set(engine.scheduler.requests) == set("bcd")
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    np.testing.assert_array_equal(
        engine.outputs["d"].routed_experts, engine.expected("d")
    )
    assert [len(engine.tokens[name]) for name in "abcd"] == [3, 9, 9, 9]


@pytest.mark.parametrize(("lost", "first"), [((5, 7), 5), ((12,), 12)])
def test_abort_without_a_full_set_of_rows_says_what_is_missing(
    model: str, lost: tuple[int, ...], first: int
):
    core = Core(make_engine(model, lost))
    core.abort_and_answer(["a", "d"])
    answers = core.answers()
    assert answers["a"].finish_reason == FinishReason.ABORT
    assert answers["a"].routed_experts is None
    assert answers["a"].error == (
        "request a: expected routed experts of tokens [0, 13), "
        f"token {first} has none (prompt 11, generated 3)"
    )
    assert answers["d"].error is None


def test_row_of_the_last_token_is_not_missed(model: str):
    core = Core(make_engine(model, lost=(13,)))
    core.abort_and_answer(["a"])
    assert core.answers()["a"].error is None


def test_abort_without_the_flag_answers_as_ever(model: str):
    engine = make_engine(model)
    engine.scheduler.routed_experts_manager = None
    core = Core(engine)
    core.abort_and_answer()
    answers = core.answers()
    assert set(answers) == set("abcd")
    assert all(output.routed_experts is None for output in answers.values())


# The front end.


class FrontEnd(AsyncLLM):
    """What AsyncLLM.abort() talks to, recording what it says."""

    def __init__(self, awaiting: dict[str, list[str]], enabled: bool = True) -> None:
        self.said: list[tuple[str, list[str]]] = []
        self.model_config = SimpleNamespace(enable_return_routed_experts=enabled)
        self.log_requests = False
        self.output_processor = SimpleNamespace(
            awaiting_routed_experts=lambda request_id: awaiting.get(request_id, []),
            abort_requests=lambda ids, internal: [f"internal {i}" for i in ids],
        )
        self.engine_core = SimpleNamespace(
            abort_and_answer_async=self._tell("answer"),
            abort_requests_async=self._tell("abort"),
        )

    def __del__(self):
        pass

    def _tell(self, what: str):
        async def tell(request_ids):
            if request_ids:
                self.said.append((what, list(request_ids)))

        return tell


@pytest.mark.parametrize("request_ids", ["a", ["a"], ("a",)])
def test_request_that_waits_for_rows_is_ended_by_the_engine(request_ids):
    front_end = FrontEnd({"a": ["0_a", "1_a"]})
    asyncio.run(front_end.abort(request_ids))
    assert front_end.said == [("answer", ["0_a", "1_a"])]


def test_request_that_wants_no_rows_is_ended_by_the_front_end():
    front_end = FrontEnd({"a": ["0_a"]})
    asyncio.run(front_end.abort(["a", "b"]))
    assert front_end.said == [("answer", ["0_a"]), ("abort", ["internal b"])]


@pytest.mark.parametrize(("enabled", "internal"), [(False, False), (True, True)])
def test_client_that_went_away_gets_nothing(enabled: bool, internal: bool):
    front_end = FrontEnd({"a": ["0_a"]}, enabled)
    asyncio.run(front_end.abort("a", internal=internal))
    assert front_end.said == [("abort", ["internal a"])]


@pytest.mark.parametrize(
    ("request_ids", "is_dead", "calls"),
    [(["a"], False, [("abort_and_answer", ["a"])]), (["a"], True, []), ([], False, [])],
)
def test_dead_engine_is_asked_for_nothing(request_ids, is_dead: bool, calls: list):
    made = []

    async def call_utility_async(*args):
        made.append(args)

    client = SimpleNamespace(
        resources=SimpleNamespace(engine_dead=is_dead),
        call_utility_async=call_utility_async,
    )
    asyncio.run(AsyncMPClient.abort_and_answer_async(client, request_ids))
    assert made == calls


def receive(processor: OutputProcessor, name: str, *, num_rows: int | None = None):
    """Let the engine answer the abort of a request; return what a client gets."""
    rows = None if num_rows is None else make_rows("a", num_rows)
    output = EngineCoreOutput(
        name, [], finish_reason=FinishReason.ABORT, routed_experts=rows
    )
    return processor.process_outputs([output]).request_outputs


def add(processor: OutputProcessor, name: str, resumable: bool = False, **params):
    sampling_params = SamplingParams(**params)

    def make(request_id: str, params: SamplingParams) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=PROMPT,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
            external_req_id=name,
        )

    if sampling_params.n == 1:
        processor.add_request(make(name, sampling_params), None)
        return
    parent = ParentRequest(make(name, sampling_params))
    for index in range(sampling_params.n):
        child = make(*parent.get_child_info(index))
        processor.add_request(child, None, parent, index)


def test_requests_that_wait_for_rows_are_found_by_their_external_id():
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    add(processor, "with")
    add(processor, "both", n=2)
    add(processor, "without", return_routed_experts=False)
    add(processor, "session", resumable=True)
    awaiting = processor.awaiting_routed_experts
    assert awaiting("with") == ["with"]
    assert awaiting("both") == ["0_both", "1_both"]
    assert awaiting("without") == awaiting("session") == awaiting("unknown") == []
    assert "unknown" not in processor.external_req_ids
    receive(processor, "0_both")
    assert awaiting("both") == ["1_both"]


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_answer_splits_the_rows_of_an_abort(num_tokens: int):
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    add(processor, "a")
    processor.process_outputs([EngineCoreOutput("a", [7] * num_tokens)])
    (output,) = receive(processor, "a", num_rows=len(PROMPT) + num_tokens - 1)
    choice = output.outputs[0]
    assert choice.finish_reason == "abort"
    assert list(choice.token_ids) == [7] * num_tokens
    rows = np.concatenate([output.prompt_routed_experts, choice.routed_experts])
    assert len(choice.routed_experts) == num_tokens - 1
    np.testing.assert_array_equal(rows, make_rows("a", len(PROMPT) + num_tokens - 1))


def test_abort_before_the_first_token_has_no_rows_and_is_no_error():
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    add(processor, "a")
    (output,) = receive(processor, "a", num_rows=len(PROMPT))
    assert output.outputs[0].finish_reason == "abort"
    assert output.prompt_routed_experts is None
    assert output.outputs[0].routed_experts is None
