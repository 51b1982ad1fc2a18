"""A fake server for the checks' code paths: a made-up model behind real HTTP.

Its rows depend on token, position and layer alone, so any endpoint gives the same ones. `faults`
switch single promises off, so that each check can be seen to fail. The real servers are tested in
tests/serving.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from sample_answers import bare, nested, npy

LAYERS, TOP_K, EXPERTS = 3, 2, 16
META = dict(
    num_layers=LAYERS, moe_layers=[1, 2], num_experts=EXPERTS, top_k=TOP_K, dtype="uint8",
    encoding="npy", layout="split",
)  # fmt: skip
INFO = {"enabled": True, **META, "version": "0.21.0+r3.1"}


def model_rows(tokens: list[int], shift: int = 0) -> np.ndarray:
    """Rows of all tokens but the last; layer 0 is dense."""
    made = np.zeros((len(tokens) - 1, LAYERS, TOP_K), np.uint8)
    for at, token in enumerate(tokens[:-1]):
        for layer in (1, 2):
            first = (token * 7 + at * 5 + layer * 3 + shift) % EXPERTS
            made[at, layer] = [first, (first + 1 + token % 3) % EXPERTS]
    return made


class FakeServer:
    """What the handler answers; `faults` names what it does wrong."""

    def __init__(self, kind: str = "r3", faults: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.faults = set(faults)
        self.calls = 0
        self.aborted = threading.Event()

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "max_model_len": 128}]}
        if path == "/routed_experts/info" and self.kind == "r3" and "no info" not in self.faults:
            info = dict(INFO)
            if "short info" in self.faults:
                del info["encoding"], info["layout"]
            if "off" in self.faults:
                info = {"enabled": False, "version": info["version"]}
            return 200, info
        if path == "/version" and self.kind != "sglang":
            return 200, {"version": "0.22.1"}
        if path == "/server_info" and self.kind == "sglang":
            return 200, {"version": "0.5.23"}
        return 404, {"detail": "Not Found"}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.calls += 1
        if path == "/tokenize":
            return 200, {"tokens": [9, 4, 11, 2, 30, 5, 8]}
        if path == "/inference/v1/abort_requests" and self.kind == "r3":
            self.aborted.set()
            return 200, {"status": "aborted", "aborted": int("no abort" not in self.faults)}
        prompt = self._prompt(path, body)
        params = body.get("sampling_params", body)
        wanted = params.get("max_tokens", params.get("max_new_tokens", 4))
        made = [(prompt[-1] * 3 + 5 * at) % 40 for at in range(1, wanted + 1)]
        if self.kind == "sglang":
            return self._sglang(prompt, made)
        return self._vllm(path, body, prompt, made)

    def _prompt(self, path: str, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            return [3, 7, 21, 9, 12]
        return body.get("token_ids") or body.get("prompt") or body["input_ids"]

    def _rows(self, tokens: list[int]) -> np.ndarray:
        rows = model_rows(tokens, shift=1 if "other rows" in self.faults else 0)
        if self.kind == "vllm" or "zeros" in self.faults:
            rows[:] = 0
        if "cold cache" in self.faults and self.calls > 2:
            rows[:4] = 0
        if "flip" in self.faults and self.calls > 2:
            rows[2, 1, 0] = next(e for e in range(EXPERTS) if e not in rows[2, 1])
        return rows

    def _sglang(self, prompt: list[int], made: list[int]) -> tuple[int, Any]:
        meta = {
            "id": "sg",
            "prompt_tokens": len(prompt),
            "completion_tokens": len(made),
            "finish_reason": {"type": "length"},
            "routed_experts": bare(self._rows(prompt + made)),
        }
        return 200, {"output_ids": made, "meta_info": meta}

    def _vllm(
        self, path: str, body: dict[str, Any], prompt: list[int], made: list[int]
    ) -> tuple[int, Any]:
        start = body.get("routed_experts_prompt_start", 0)
        known = self.kind == "r3"
        if known and not 0 <= start <= len(prompt):
            message = f"routed_experts_prompt_start must be in [0, {len(prompt)}], got {start}"
            return 400, {"error": {"message": message}}
        if known and body.get("routed_experts_encoding") == "file" and "file" not in self.faults:
            return 400, {"error": {"message": "runs without --routed-experts-dir"}}
        start = start if known and "no start" not in self.faults else 0
        reason = "length"
        is_named = known and "request_id" in body and self.aborted.wait(10)
        if is_named and "no abort" not in self.faults:
            made, reason = made[:3], "abort"
        rows = self._rows(prompt + made)
        choice: dict[str, Any] = {"index": 0, "token_ids": made, "finish_reason": reason}
        choice["logprobs"] = {"content": [{"logprob": -1.0} for _ in made]}
        answer: dict[str, Any] = {"request_id": "r", "choices": [choice]}
        if path != "/inference/v1/generate":
            answer["prompt_token_ids" if "chat" in path else "x"] = prompt
        if path in self.faults:
            return 200, answer
        if known and body.get("return_routed_experts") is False:
            return 200, answer
        self._place(answer, choice, rows, len(prompt), start, body if known else {})
        return 200, answer

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The chunks of an answer, the last token in one of its own."""
        _, whole = self.post(path, body)
        (choice,) = whole["choices"]
        if {"no meta", "no delta"} & self.faults or self.kind != "r3":
            return [whole]
        meta, tokens = whole["routed_experts_meta"], choice["token_ids"]
        prompt = len(self._prompt(path, body))
        rows = self._rows([*self._prompt(path, body), *tokens])[prompt:]
        row = prompt + len(rows) - 1
        head = choice | {"token_ids": tokens[:-1], "routed_experts": npy(rows[:-1])}
        last = {"index": 0, "token_ids": tokens[-1:], "routed_experts": npy(rows[-1:])}
        return [
            whole | {"choices": [head | {"finish_reason": None}]},
            {
                "choices": [last | {"finish_reason": "length"}],
                "routed_experts_meta": meta | {"start": row},
            },
        ]

    def _place(
        self, answer: dict, choice: dict, rows: np.ndarray, prompt: int, start: int, body: dict
    ) -> None:
        asked = {} if "no forms" in self.faults else body
        layout = asked.get("routed_experts_layout", "split") if self.kind == "r3" else "full"
        encode = nested if asked.get("routed_experts_encoding") == "list" else npy
        if layout == "split":
            answer["prompt_routed_experts"] = encode(rows[start:prompt])
            choice["routed_experts"] = encode(rows[prompt:])
        else:
            choice["routed_experts"] = encode(rows[start:])
        if self.kind == "r3" and "no meta" not in self.faults:
            dtype = "int16" if "other meta" in self.faults else "uint8"
            meta = {**META, "layout": layout, "start": start, "dtype": dtype}
            answer["routed_experts_meta"] = meta
            if "no versions" not in self.faults:
                meta["weight_versions"], answer["weight_version"] = [[start, "v1"]], "v1"


@contextmanager
def serving(kind: str = "r3", faults: tuple[str, ...] = ()) -> Iterator[str]:
    """Serve a fake on a free port and give its address."""
    fake = FakeServer(kind, faults)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*fake.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body.get("stream"):
                lines = [json.dumps(chunk) for chunk in fake.stream(self.path, body)]
                self._send(200, "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]))
            else:
                self._answer(*fake.post(self.path, body))

        def _answer(self, status: int, body: Any) -> None:
            self._send(status, json.dumps(body))

        def _send(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
