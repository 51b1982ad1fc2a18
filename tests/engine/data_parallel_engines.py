"""Run the same requests through plain and data-parallel engines, and save what came back.

    python tests/engine/data_parallel_engines.py MODELS_DIR OUT_DIR

A process of its own, started by test_data_parallel.py with the platform of
data_parallel_platform.py. MODELS_DIR/KIND is a tiny model. For each case OUT_DIR
gets NAME.npz (tokens and rows), NAME.json (what the counters say), NAME.notes (what ranks saw).
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from engines import CPU_ENV, DEFAULTS, seeded_prompts

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
    "plain-moe": Case("moe", {}),
    "plain-dense-between": Case("dense-between", {}),
    "plain-glm4": Case("glm4", {}),
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
    num_ranks = llm.vllm_config.parallel_config.data_parallel_size
    everyone = range(len(PROMPTS))
    for turn in ("cold", "warm"):
        await asyncio.gather(*(ask(llm, turn, i, RANKS[i] % num_ranks, saved) for i in everyone))
    for rank in range(2):
        others = [i for i in everyone if RANKS[i] != rank]
        await asyncio.gather(*(ask(llm, "swapped", i, rank % num_ranks, saved) for i in others))
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


async def run(models: Path, out: Path, name: str) -> None:
    """Run one case and save it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    case = CASES[name]
    ours = dict(notes=str(out / f"{name}.notes"), modular=case.modular)
    options = DEFAULTS | OPTIONS | dict(additional_config=ours)
    args = AsyncEngineArgs(str(models / case.kind), **(options | case.options))
    llm = AsyncLLM.from_engine_args(args)
    try:
        np.savez(out / f"{name}.npz", **await ask_all(llm))
        parallel = llm.vllm_config.parallel_config
        facts = counters() | dict(sequence_parallel=parallel.use_sequence_parallel_moe)
        (out / f"{name}.json").write_text(json.dumps(facts))
    finally:
        llm.shutdown()


def run_case(models: Path, out: Path, name: str) -> None:
    """Run one case in a process of its own."""
    asyncio.run(run(models, out, name))


def main(models: str, out: str) -> None:
    """Run all cases, each in a copy of this process, which has done nothing but import."""
    os.environ |= CPU_ENV | {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm.platforms import current_platform

    assert type(current_platform).__name__ == "DataParallelCpuPlatform", "no plugin"
    for name in CASES:
        process = multiprocessing.get_context("fork").Process(
            target=run_case, args=(Path(models), Path(out), name)
        )
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"case {name} ended with {process.exitcode}")


if __name__ == "__main__":
    main(*sys.argv[1:])
