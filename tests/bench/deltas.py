"""What rows with every token cost the host: microseconds, by themselves, on no model.

    python -m tests.bench.deltas

256 streams of 48 layers x 8 experts: the engine core's calls of a step, both ends of the message,
and a chunk of the API server, with `routed_experts_stream` "delta" and with "end".
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.routed_experts.answer import RoutedExpertsAnswer
from vllm.entrypoints.serve.routed_experts.delta import RoutedExpertsDeltas
from vllm.entrypoints.serve.routed_experts.protocol import RoutedExpertsMeta
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.routed_experts_manager import RoutedExpertsManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.routed_experts import hand_out_rows_of_step
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.routed_experts import RoutedExpertsInfo
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

STREAMS, LAYERS, TOP_K, EXPERTS, BLOCK, PROMPT = 256, 48, 8, 128, 16, 2000
BLOCKS_EACH = 160


def median(call: Callable[[int], Any], times: int = 300) -> float:
    """Microseconds of `call(n)`, the median over n."""
    spent = []
    for n in range(times):
        begin = time.perf_counter()
        call(n)
        spent.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(spent)


def manager() -> tuple[RoutedExpertsManager, list[Any]]:
    """A manager whose requests have long prompts, and the requests."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=None)
    group = SimpleNamespace(kv_cache_spec=spec)
    blocks: dict[str, list[KVCacheBlock]] = {}
    single = SimpleNamespace(req_to_blocks=blocks)
    kv = SimpleNamespace(
        max_model_len=32768,
        block_pool=SimpleNamespace(num_gpu_blocks=STREAMS * BLOCKS_EACH),
        coordinator=SimpleNamespace(single_type_managers=[single]),
    )
    info = RoutedExpertsInfo(LAYERS, list(range(LAYERS)), EXPERTS, TOP_K)
    made = RoutedExpertsManager(info, SimpleNamespace(kv_cache_groups=[group]), kv)
    made.table._is_valid[:] = True
    params = SamplingParams(routed_experts_stream="delta")
    requests = []
    for number in range(STREAMS):
        name = f"request-{number}"
        first = number * BLOCKS_EACH
        blocks[name] = [KVCacheBlock(first + block) for block in range(BLOCKS_EACH)]
        made._next_row[name] = PROMPT
        made._versions_told[name] = PROMPT, made.weight_versions.number
        requests.append(
            SimpleNamespace(
                request_id=name, num_tokens=PROMPT + 1, client_index=0, sampling_params=params
            )
        )
    return made, requests


def engine_core() -> dict[str, float]:
    made, requests = manager()
    steps: list[EngineCoreOutputs] = []

    def step(n: int) -> None:
        counts = []
        for request in requests:
            request.num_tokens += 1
            counts.append(made.send_with_step(request))
        outputs = {0: EngineCoreOutputs(outputs=[])}
        made.fill_step(outputs)
        assert counts == [1] * STREAMS
        steps.append(outputs[0])

    found = {"engine core, a step": median(step)}
    rows = steps[-1].routed_experts
    for kind in ("end", "delta"):
        outputs = EngineCoreOutputs(
            outputs=[
                EngineCoreOutput(r.request_id, [5], num_routed_experts=int(kind == "delta"))
                for r in requests
            ]
        )
        outputs.routed_experts = rows if kind == "delta" else None
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        frames = [bytes(f) for f in encoder.encode(outputs)]
        found[f"encode a step, {kind}"] = median(lambda n, o=outputs, e=encoder: e.encode(o))

        def read(n: int, frames: Any = frames, decoder: Any = decoder) -> None:
            hand_out_rows_of_step(decoder.decode(frames))

        found[f"decode and hand out a step, {kind}"] = median(read)
    return found


def api_server() -> dict[str, float]:
    meta = RoutedExpertsMeta(
        num_layers=LAYERS, moe_layers=list(range(LAYERS)), num_experts=EXPERTS, top_k=TOP_K,
        dtype="uint8", start=0, encoding="npy", layout="split",
    )  # fmt: skip
    rows = np.random.default_rng(0).integers(0, EXPERTS, (1, LAYERS, TOP_K)).astype("uint8")
    prompt, found = [1] * PROMPT, {}
    for kind, answer in (("end", RoutedExpertsAnswer(meta)), ("delta", RoutedExpertsDeltas(meta))):
        if kind == "delta":
            answer._next_row[0], answer._prompt_rows_sent = PROMPT, True

        def chunk(n: int, kind: str = kind, answer: Any = answer) -> None:
            output = CompletionOutput(0, "a", [5], None, None, rows if kind == "delta" else None)
            res = RequestOutput("r", None, prompt, None, [output], False)
            choice = CompletionResponseStreamChoice(index=0, text="a", token_ids=[5])
            made = CompletionStreamResponse(id="r", model="m", choices=[choice])

            async def write() -> None:
                async for _ in answer.events(made, res, output, n + 2, exclude_unset=True):
                    pass

            write_now(write())

        found[f"API server, a chunk, {kind}"] = median(chunk, 3000)
    return found


def write_now(coroutine: Any) -> None:
    """Run what never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    asyncio.run(coroutine)


if __name__ == "__main__":
    print(json.dumps({k: round(v, 1) for k, v in (engine_core() | api_server()).items()}, indent=1))
