"""What rows cost whoever asks a server over HTTP: conversations of many turns, many streams.

    python -m tests.bench.serving --out OUT [--shape tiny] [--rounds 3] [turns] [streams]

One server with the flag off and one with it on start and stay up together; each workload runs on
them in turn, round by round. Their weights are random.

- `turns`: LANES conversations at once on `/inference/v1/generate`; each turn's prompt is all that
  was said, the tokens generated last and new ones. Rows are not asked for (`off` on the server
  without, `unasked` on the one with), come whole (`npy`, `list`, `file`), or without those the
  client still holds (`npy-start`: `routed_experts_prompt_start`). `file` reads the array's bytes.
- `streams`: STREAMS completions at once, streamed, rows at the end or with every chunk (`delta`).

Medians over the rounds and their ratio to `off`: seconds of a turn (median and 99th percentile
over turns) and generated tokens a second; all values go to OUT/serving.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.bench.engine import SHAPES, summarize, write_config, write_results
from vllm_r3.demo.serve import Server

# shape -> lanes, turns, first prompt, generated and new tokens a turn; streams, prompt, generated
LOADS = {
    "qwen3-30b-a3b": ((32, 8, 1024, 256, 256), (256, 128, 192)),
    "tiny": ((4, 4, 64, 16, 16), (8, 32, 32)),
}
TURNS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "unasked": dict(return_routed_experts=False),
    "npy": dict(routed_experts_encoding="npy"),
    "npy-start": dict(routed_experts_encoding="npy"),
    "file": dict(routed_experts_encoding="file"),
    "list": dict(routed_experts_encoding="list"),
}
STREAMS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "unasked": dict(return_routed_experts=False),
    "end": dict(routed_experts_stream="end"),
    "delta": dict(routed_experts_stream="delta"),
}


def row_bytes(answer: dict[str, Any], form: str, directory: Path) -> int:
    """Bytes of an answer's completion rows, reading the file that holds them; 0 without."""
    rows = answer["choices"][0].get("routed_experts")
    if rows is not None and form == "file":
        return len((directory / rows["name"]).read_bytes())
    return 0 if rows is None else len(json.dumps(rows)) if form == "list" else len(rows)


async def turns(http: aiohttp.ClientSession, url: str, form: str, args: Any) -> dict[str, float]:
    """Run all conversations; seconds of a turn and tokens a second."""
    lanes, rounds, first, generated, new = LOADS[args.shape][0]
    rng = np.random.default_rng(args.seed)
    args.seed += 1
    vocabulary = SHAPES[args.shape]["vocab_size"]
    spent: list[float] = []

    async def lane(tokens: list[int]) -> None:
        held = 0
        for _ in range(rounds):
            body = dict(
                token_ids=tokens,
                sampling_params=dict(max_tokens=generated, ignore_eos=True, detokenize=False),
                **TURNS[form] or {},
            )
            if form == "npy-start":
                body["routed_experts_prompt_start"] = held
            begin = time.perf_counter()
            async with http.post(f"{url}/inference/v1/generate", json=body) as response:
                answer = json.loads(await response.read())
            spent.append(time.perf_counter() - begin)
            if bool(row_bytes(answer, form, args.out / "rows")) != (form not in ("off", "unasked")):
                raise SystemExit(f"{form}: {str(answer)[:500]}")
            tokens = tokens + answer["choices"][0]["token_ids"]
            held = len(tokens) - 1
            tokens += rng.integers(0, vocabulary, new).tolist()

    begin = time.perf_counter()
    await asyncio.gather(*(lane(rng.integers(0, vocabulary, first).tolist()) for _ in range(lanes)))
    seconds = time.perf_counter() - begin
    return {
        "turn_s": statistics.median(spent),
        "turn_p99_s": float(np.quantile(spent, 0.99)),
        "turns_tokens_per_s": lanes * rounds * generated / seconds,
    }


async def streams(http: aiohttp.ClientSession, url: str, form: str, args: Any) -> dict[str, float]:
    """Run all streams; milliseconds between a stream's chunks and tokens a second."""
    count, prompt, generated = LOADS[args.shape][1]
    rng = np.random.default_rng(args.seed)
    args.seed += 1
    gaps: list[float] = []

    async def stream(tokens: list[int]) -> None:
        body = dict(
            prompt=tokens, max_tokens=generated, ignore_eos=True, stream=True, detokenize=False,
            return_token_ids=True, **STREAMS[form] or {},
        )  # fmt: skip
        chunks, rows, longest, last = 0, 0, 0, 0.0
        async with http.post(f"{url}/v1/completions", json=body) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                longest = max(longest, len(line))
                rows += b'"routed_experts":"' in line
                now = time.perf_counter()
                if chunks:
                    gaps.append(now - last)
                chunks, last = chunks + 1, now
        # a slow client gets several tokens in one chunk
        least = dict(end=1, delta=chunks - 1).get(form, 0)
        if chunks < generated // 2 or rows < least or (least == 0 and rows):
            raise SystemExit(f"{form}: {chunks} chunks, {rows} with rows, last {line[:300]!r}")

    vocabulary = SHAPES[args.shape]["vocab_size"]
    prompts = [rng.integers(0, vocabulary, prompt).tolist() for _ in range(count)]
    begin = time.perf_counter()
    await asyncio.gather(*map(stream, prompts))
    seconds = time.perf_counter() - begin
    return {
        "chunk_ms": statistics.median(gaps) * 1e3,
        "streams_tokens_per_s": count * generated / seconds,
    }


async def measure(urls: dict[bool, str], args: Any) -> None:
    found: dict[str, dict[str, dict[str, list[float]]]] = {w: {} for w in args.workloads}
    connector = aiohttp.TCPConnector(limit=0)
    limits = aiohttp.ClientTimeout(total=None)
    # the last chunk of "end" holds all rows in one line
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, read_bufsize=2**26
    ) as http:
        for workload in args.workloads:
            run, forms = (turns, TURNS) if workload == "turns" else (streams, STREAMS)
            chosen = [form for form in forms if form not in args.without]
            for number in range(args.rounds + 1):
                for form in chosen if number % 2 else reversed(chosen):
                    values = await run(http, urls[forms[form] is not None], form, args)
                    if number:  # the first round warms up
                        for name, value in values.items():
                            found[workload].setdefault(form, {}).setdefault(name, []).append(value)
                if number:
                    write_results(args.out / "serving.json", [found])
                    print(f"{workload}: {number} of {args.rounds} rounds, medians so far")
                    by_form = [(form, found[workload][form]) for form in chosen]
                    print(summarize(by_form), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", default=["turns", "streams"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, help="run with fewer layers")
    parser.add_argument("--kv-gib", type=float, default=1.0, help="GiB of KV cache of each server")
    parser.add_argument("--without", nargs="*", default=["list"], help="forms to leave out")
    args = parser.parse_args()
    args.seed = 0
    model = write_config(args.shape, args.out / f"model-{args.shape}")
    options = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "8192"]
    options += ["--kv-cache-memory-bytes", str(int(args.kv_gib * 2**30))]
    options += ["--gpu-memory-utilization", "0.1", "--max-num-seqs", "256"]
    if args.layers:
        options += ["--hf-overrides", json.dumps(dict(num_hidden_layers=args.layers))]
    if args.shape == "tiny":
        options += ["--enforce-eager"]
    rows = ["--enable-return-routed-experts", "--routed-experts-dir", str(args.out / "rows")]
    (args.out / "rows").mkdir(exist_ok=True)
    servers = {
        on: Server(
            Path(model), *options, *(rows if on else []), log_path=args.out / f"server-{on}.log"
        )
        for on in (False, True)
    }
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        for server in pool.map(Server.__enter__, servers.values()):
            stack.push(server)
        asyncio.run(measure({on: server.url for on, server in servers.items()}, args))


if __name__ == "__main__":
    sys.exit(main())
