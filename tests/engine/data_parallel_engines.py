"""Run the same requests through data-parallel engines, and save what came back.

`run_case` runs in a forked process of its own, started by test_data_parallel.py. It writes NAME.npz
(tokens and rows), NAME.json (what the counters say) and NAME.notes (what the ranks saw).
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cpu_platform import changed_platform
from engines import DEFAULTS, seeded_prompts

PROMPTS = seeded_prompts(91, [3, 120, 15, 16, 90, 17, 31, 32, 64, 33, 5, 100])
# Few long ones and many short ones: now one rank has more tokens in a step, now the other.
RANKS = [int(len(prompt) < 50 and len(prompt) != 17) for prompt in PROMPTS]
MAX_TOKENS = 16
# Long prompts come in chunks.
OPTIONS = dict(max_num_batched_tokens=64)
TURNS = ("cold", "warm", "swapped")
EP = dict(enable_expert_parallel=True)
TP = dict(tensor_parallel_size=2)
DP = dict(data_parallel_size=2)


class Case(NamedTuple):
    """One engine: which model, what is parallel, and whose MoE kernel.

    With the CPU build's own kernel a rank routes what all ranks have dispatched, with the modular
    one it routes its own tokens and dispatches their ids.
    """

    kind: str
    options: dict[str, Any]
    modular: bool = False


CASES = {
    "logits-dp": Case("moe", DP),
    "logits-dp-ep": Case("dense-between", DP | EP),
    "logits-tp-dp-ep": Case("moe", TP | DP | EP),
    "ids-dp": Case("glm4", DP, modular=True),
    "ids-dp-ep": Case("moe", DP | EP, modular=True),
    "ids-tp-dp-ep": Case("dense-between", TP | DP | EP, modular=True),
}


async def ask(llm: Any, turn: str, i: int, rank: int, saved: dict[str, np.ndarray]) -> None:
    """Send one request to one rank; keep its tokens and rows."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[i]}
    name = f"{turn}{i}"
    async for answer in llm.generate(prompt, params, name, data_parallel_rank=rank):
        output = answer
    (choice,) = output.outputs
    saved["tokens-" + name] = np.array([*output.prompt_token_ids, *choice.token_ids])
    saved["cached-" + name] = np.array(output.num_cached_tokens)
    saved["prompt-" + name] = output.prompt_routed_experts
    saved["rows-" + name] = choice.routed_experts


async def ask_all(llm: Any) -> dict[str, np.ndarray]:
    """Every prompt on its rank, again from the cache, and alone on the other rank."""
    saved: dict[str, np.ndarray] = {}
    everyone = range(len(PROMPTS))
    for turn in ("cold", "warm"):
        await asyncio.gather(*(ask(llm, turn, i, RANKS[i], saved) for i in everyone))
    for rank in range(2):
        others = [i for i in everyone if RANKS[i] != rank]
        await asyncio.gather(*(ask(llm, "swapped", i, rank, saved) for i in others))
    return saved


def counters() -> dict[str, dict[str, float]]:
    """Requests answered and rows not found, by rank."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found: dict[str, dict[str, float]] = {"answered": {}, "invalid": {}}
    names = {
        "vllm:request_success": "answered",
        "vllm:routed_experts_invalid_reads": "invalid",
    }
    for metric in get_metrics_snapshot():
        if metric.name in names:
            values, rank = found[names[metric.name]], metric.labels["engine"]
            values[rank] = values.get(rank, 0) + metric.value
    return found


async def run(model: Path, out: Path, name: str) -> None:
    """Run one case and save it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    case = CASES[name]
    ours = dict(notes=str(out / f"{name}.notes"), modular=case.modular)
    options = DEFAULTS | OPTIONS | dict(additional_config=ours)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), **(options | case.options)))
    try:
        np.savez(out / f"{name}.npz", **await ask_all(llm))
        parallel = llm.vllm_config.parallel_config
        facts = counters() | dict(sequence_parallel=parallel.use_sequence_parallel_moe)
        (out / f"{name}.json").write_text(json.dumps(facts))
    finally:
        llm.shutdown()


def run_case(model: Path, out: Path, name: str) -> None:
    """Run one case in this process, which has done nothing but import."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    with changed_platform(data_parallel=True):
        asyncio.run(run(model, out, name))
