"""How long a long answer takes from the JSON's base64 string to the trainer's array.

    python tests/bench/decode.py [--tokens 32768] [--layers 48] [--top-k 8] [--experts 128]
    [--out FILE]

Measures `decode_choice` on split and full answers with pybase64 and with the standard library, the
median of many runs after a warm-up, and the bytes that one call allocates at its peak. Prints one
JSON object.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_r3.client import decode_choice
from vllm_r3.client import npy as client_npy


def npy(rows: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return base64.b64encode(buffer.getvalue()).decode()


def answers(rows: np.ndarray, prompt: int) -> dict[str, dict[str, Any]]:
    """The same rows as this project's split answer and as a full one."""
    choice = {"index": 0, "token_ids": [0] * (len(rows) + 1 - prompt), "finish_reason": "length"}
    return {
        "split": {
            "prompt_routed_experts": npy(rows[:prompt]),
            "choices": [{**choice, "routed_experts": npy(rows[prompt:])}],
        },
        "full": {"choices": [{**choice, "routed_experts": npy(rows)}]},
    }


def timed(call: Callable[[], object], runs: int) -> dict[str, float]:
    for _ in range(3):
        call()
    spent, cpu = [], []
    for _ in range(runs):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        call()
        spent.append((time.perf_counter() - begin) * 1e3)
        cpu.append((time.process_time() - begin_cpu) * 1e3)
    # CPU time is of use where other work shares the cores
    found = {"median_ms": statistics.median(spent), "cpu_median_ms": statistics.median(cpu)}
    return {name: round(value, 3) for name, value in found.items()}


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that one call held at a time, the result included."""
    tracemalloc.start()
    result = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del result
    return peak


def measure(rows: np.ndarray, experts: int, runs: int) -> list[dict[str, Any]]:
    prompt = len(rows) // 2
    found = []
    fast = client_npy.pybase64
    for decoder in ["pybase64", "base64"] if fast is not None else ["base64"]:
        client_npy.pybase64 = fast if decoder == "pybase64" else None
        for layout, answer in answers(rows, prompt).items():

            def call(answer: dict[str, Any] = answer) -> np.ndarray:
                return decode_choice(answer, num_prompt=prompt).rows

            assert np.array_equal(call(), rows)
            copies = round(peak_bytes(call) / rows.nbytes, 3)
            found.append(
                {
                    "decoder": decoder,
                    "layout": layout,
                    **timed(call, runs),
                    "peak_over_result": copies,
                }
            )
    client_npy.pybase64 = fast
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--out", help="write the JSON object here too")
    args = parser.parse_args()
    shape = (args.tokens - 1, args.layers, args.top_k)
    dtype = np.uint8 if args.experts <= 256 else np.int16
    rows = np.random.default_rng(0).integers(0, args.experts, shape, dtype)
    result = {
        "what": "decode_choice, base64 string to array",
        "rows": list(shape),
        "dtype": str(rows.dtype),
        "runs": args.runs,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "load_average": os.getloadavg()[0],
        "results": measure(rows, args.experts, args.runs),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
