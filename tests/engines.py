"""Start real engines in the test process, one at a time, and look inside them.

The engine core (scheduler, block pool, store of rows) runs in this process, the model in
a worker process, so a test can count preemptions and look at the block pool.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cpu_platform import ENV, changed_platform
from oracle_checks import check_completion

from vllm_r3.checks.rows import Compared
from vllm_r3.replay.oracle import Oracle

BLOCK = 16
END = 509  # the tokenizer's end of text
CPU_ENV = ENV | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
DEFAULTS: dict[str, Any] = dict(
    dtype="float32",
    enforce_eager=True,
    max_model_len=512,
    block_size=BLOCK,
    max_num_seqs=16,
    seed=0,
    enable_return_routed_experts=True,
    disable_log_stats=False,
)


class Engine:
    """An in-process `LLM`, the oracle of its model and short ways to use both."""

    def __init__(self, llm: Any, oracle: Oracle) -> None:
        self.llm = llm
        self.oracle = oracle

    @property
    def scheduler(self) -> Any:
        """The scheduler that serves this engine."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[Any]:
        """Outputs in the order of `prompts`; greedy unless told otherwise."""
        from vllm import SamplingParams

        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 16} | sampling))
        inputs = [{"prompt_token_ids": p} for p in prompts]
        return self.llm.generate(inputs, params, use_tqdm=False)

    def check(self, prompts: list[list[int]], **sampling: Any) -> list[Any]:
        """Generate, compare every row of every choice with the oracle, return the outputs."""
        outputs = self.generate(prompts, **sampling)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.compare(prompt, output, **sampling)
        return outputs

    def compare(self, prompt: list[int], output: Any, **sampling: Any) -> list[Compared]:
        """Compare all choices of one output, in either layout, with the oracle."""
        return [
            check_completion(
                self.oracle,
                prompt,
                choice,
                output.prompt_routed_experts,
                start=sampling.get("routed_experts_prompt_start", 0),
                greedy=not sampling.get("temperature") and not sampling.get("logit_bias"),
                where=f"prompt of {len(prompt)}, choice {choice.index}",
            )
            for choice in output.outputs
        ]

    def metric(self, name: str) -> float:
        """Value of one counter of the stock metrics, summed over its labels."""
        found = [m.value for m in self.llm.get_metrics() if m.name == name]
        assert found, f"no metric {name}"
        return sum(found)

    @contextlib.contextmanager
    def few_blocks(self, blocks: int) -> Iterator[Counter[str]]:
        """Leave only so many free blocks for the duration; counts preemptions by request."""
        pool, scheduler = self.scheduler.kv_cache_manager.block_pool, self.scheduler
        assert self.llm.reset_prefix_cache()
        held = pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
        preempted: Counter[str] = Counter()

        def preempt(request: Any, timestamp: float) -> None:
            preempted[request.request_id] += 1
            type(scheduler)._preempt_request(scheduler, request, timestamp)

        scheduler._preempt_request = preempt
        try:
            yield preempted
        finally:
            del scheduler._preempt_request
            pool.free_blocks(held)
            assert self.llm.reset_prefix_cache()

    def leftovers(self) -> dict[str, int]:
        """What the scheduler still holds for requests; all zero when none runs."""
        manager = self.scheduler.routed_experts_manager
        kept = {name: len(v) for name, v in vars(manager).items() if isinstance(v, (dict, set))}
        return kept | {"requests": len(self.scheduler.requests)}


@contextlib.contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Set variables (None: unset) for the duration."""
    before = {name: os.environ.get(name) for name in variables}
    _put(variables)
    try:
        yield
    finally:
        _put(before)


def _put(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def engine(
    model: Path, oracle: Oracle, is_async: bool = False, compiled: bool = False, **options: Any
) -> Iterator[Engine]:
    """Start an engine on `model`, stop its workers at the end.

    Args:
        is_async: schedule asynchronously, which the CPU platform does not by itself.
        compiled: let torch.compile run, as without `--enforce-eager`.
        options: of `vllm.LLM`, on top of DEFAULTS.
    """
    dynamo = {"TORCHDYNAMO_DISABLE": None if compiled else "1"}
    with environment(**CPU_ENV | dynamo):
        from vllm import LLM, envs

        envs.disable_envs_cache()  # an earlier engine in this process has filled it
        with changed_platform(is_async):
            llm = LLM(str(model), **(DEFAULTS | {"enforce_eager": not compiled} | options))
        try:
            yield Engine(llm, oracle)
        finally:
            llm.llm_engine.engine_core.shutdown()


def seeded_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    """Random prompts without special tokens, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, END, n).tolist() for n in lengths]
