"""What an answer with rows costs the API server, from the engine's message to the socket.

    python tests/bench/serving_encode.py [--tokens 1024 8192 32768] [--out FILE]

Serves one fixed engine output over loopback HTTP (uvicorn, FastAPI, the response models and
the writer of `/v1/completions`; no model runs) as `npy`, as `list` and as stock 0.21.0 does it:
nested lists inside the pydantic model. One client asks again and again. Reports the server
process's CPU time an answer, requests a second, the size, and the longest time in which the
event loop served nobody else. Prints a table; needs a patched vLLM.

P prompt tokens, S all tokens (S - 1 rows), 48 layers, 8 of 128 experts.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from vllm_r3.demo.serve import HOST, free_port

LAYERS, TOP_K, EXPERTS = 48, 8, 128
FORMS = ("stock lists", "list", "npy")


def engine_message(tokens: int, dtype: str) -> list[Any]:
    """The frames by which the engine sends a finished request's rows."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.serial_utils import MsgpackEncoder

    rows = np.random.default_rng(0).integers(0, EXPERTS, (tokens - 1, LAYERS, TOP_K), dtype)
    output = EngineCoreOutput("one", [1], finish_reason=FinishReason.LENGTH, routed_experts=rows)
    return [bytes(part) for part in MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))]


def stock_models() -> tuple[type, type]:
    """Response models with the row fields of 0.21.0."""
    from vllm.entrypoints.openai.completion.protocol import (
        CompletionResponse,
        CompletionResponseChoice,
    )

    class Choice(CompletionResponseChoice):
        routed_experts: list[list[list[int]]] | None = None

    class Response(CompletionResponse):
        prompt_routed_experts: list[list[list[int]]] | None = None
        choices: list[Choice]

    return Response, Choice


class Answers:
    """Builds the answer of one form anew for every request."""

    def __init__(self, form: str, tokens: int) -> None:
        from vllm.entrypoints.openai.completion.protocol import (
            CompletionResponse,
            CompletionResponseChoice,
        )
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        self.form, self.prompt = form, tokens // 2
        stock = form == "stock lists"
        self.message = engine_message(tokens, "int16" if stock else "uint8")
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.token_ids = list(range(tokens - self.prompt))
        models = (CompletionResponse, CompletionResponseChoice)
        self.response, self.choice = stock_models() if stock else models

    async def build(self) -> Any:
        """Engine message to HTTP response."""
        rows = self.decoder.decode(self.message).outputs[0].routed_experts
        prompt_rows, rows = rows[: self.prompt], rows[self.prompt :]
        if self.form == "stock lists":
            return self._stock(prompt_rows, rows)
        return await self._ours(prompt_rows, rows)

    def _respond(self, prompt_rows: Any = None, rows: Any = None) -> Any:
        from vllm.entrypoints.openai.engine.protocol import UsageInfo

        choice = self.choice(index=0, text="x", token_ids=self.token_ids, routed_experts=rows)
        fields = {"usage": UsageInfo(), "prompt_routed_experts": prompt_rows}
        return self.response(model="m", choices=[choice], **fields)

    def _stock(self, prompt_rows: np.ndarray, rows: np.ndarray) -> Any:
        from fastapi.responses import JSONResponse

        model = self._respond(prompt_rows.tolist(), rows.tolist())
        return JSONResponse(content=model.model_dump())

    async def _ours(self, prompt_rows: np.ndarray, rows: np.ndarray) -> Any:
        from vllm.entrypoints.serve.routed_experts.answer import RoutedExpertsAnswer
        from vllm.entrypoints.serve.routed_experts.protocol import RoutedExpertsMeta
        from vllm.entrypoints.serve.routed_experts.splice import json_response
        from vllm.outputs import CompletionOutput, RequestOutput

        meta = RoutedExpertsMeta(
            **{"start": 0, "num_layers": LAYERS, "moe_layers": list(range(LAYERS))},
            **{"num_experts": EXPERTS, "top_k": TOP_K, "dtype": "uint8"},
            **{"encoding": self.form, "layout": "split"},
        )
        output = CompletionOutput(0, "x", self.token_ids, None, None, rows, "length")
        result = RequestOutput(
            *("one", None, [0] * self.prompt, None, [output], True),
            prompt_routed_experts=prompt_rows,
        )
        answer = RoutedExpertsAnswer(meta)
        answer.take(result)
        response = self._respond()
        answer.fill(response)
        return await json_response(response)


def serve(port: int, form: str, tokens: int) -> None:
    """Run the server process."""
    import uvicorn
    from fastapi import FastAPI

    app, answers, held = FastAPI(), Answers(form, tokens), [0.0]

    @app.on_event("startup")
    async def watch_the_loop() -> None:
        async def watch() -> None:
            while True:
                begin = time.perf_counter()
                await asyncio.sleep(0.001)
                held[0] = max(held[0], time.perf_counter() - begin - 0.001)

        app.state.watch = asyncio.create_task(watch())

    @app.get("/answer")
    async def answer() -> Any:
        return await answers.build()

    @app.get("/spent")
    async def spent() -> dict[str, float]:
        longest, held[0] = held[0], 0.0
        return {"cpu_s": time.process_time(), "held_s": longest}

    uvicorn.run(app, host=HOST, port=port, log_level="error", loop="uvloop", http="httptools")


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        deadline = time.monotonic() + 120
        while True:
            self.connection = http.client.HTTPConnection(HOST, port, timeout=120)
            try:
                self.get("/spent")
                return
            except OSError:
                self.connection.close()
                assert time.monotonic() < deadline, "the server did not come up"
                time.sleep(0.2)

    def get(self, path: str) -> bytes:
        self.connection.request("GET", path)
        return self.connection.getresponse().read()


def measure(form: str, tokens: int, seconds: float) -> dict[str, Any]:
    """Ask for `seconds` after a warm-up, three times; medians over the three."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port, form, tokens))
    process.start()
    try:
        client = Client(port)
        size = len(client.get("/answer"))
        rounds = [one_round(client, seconds) for _ in range(3)]
    finally:
        process.terminate()
        process.join()
    found = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    spread = [r["cpu_ms"] for r in rounds]
    return {
        **{"form": form, "tokens": tokens, "bytes": size, **found},
        **{"cpu_ms_min": min(spread), "cpu_ms_max": max(spread)},
    }


def one_round(client: Client, seconds: float) -> dict[str, float]:
    before = json.loads(client.get("/spent"))
    begin, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - begin < seconds:
        client.get("/answer")
        count += 1
    wall = time.perf_counter() - begin
    after = json.loads(client.get("/spent"))
    return {
        "answers": count,
        "cpu_ms": (after["cpu_s"] - before["cpu_s"]) / count * 1e3,
        "held_ms": after["held_s"] * 1e3,
        "requests_per_s": count / wall,
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results in markdown; `less` compares with the stock lists of the same length."""
    lines = [
        "| tokens | form | MB | server CPU ms an answer | less | event loop held ms | requests/s |",
        "|---|---|---|---|---|---|---|",
    ]
    stock = {r["tokens"]: r["cpu_ms"] for r in results if r["form"] == "stock lists"}
    for r in results:
        lines.append(
            f"| {r['tokens']} | {r['form']} | {r['bytes'] / 1e6:.1f} | {r['cpu_ms']:.1f} "
            f"({r['cpu_ms_min']:.1f} to {r['cpu_ms_max']:.1f}) | "
            f"{stock[r['tokens']] / r['cpu_ms']:.0f} x | {r['held_ms']:.1f} | "
            f"{r['requests_per_s']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each of three rounds")
    parser.add_argument("--out", type=Path, help="write FILE (JSON) and FILE.md (the table)")
    args = parser.parse_args()
    results = [measure(form, n, args.seconds) for n in args.tokens for form in FORMS]
    print(table(results))
    if args.out:
        result = {
            "what": "API server, engine message to socket, one client",
            "rows": f"(tokens - 1, {LAYERS}, {TOP_K})",
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "results": results,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(results) + "\n")


if __name__ == "__main__":
    main()
