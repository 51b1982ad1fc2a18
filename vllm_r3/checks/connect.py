"""A server under test: what it says of itself, one request in its dialect.

Knows this project's servers, stock vLLM and SGLang, and has errors in words. It imports numpy only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_r3.client import ChoiceRoutes, RouteShape, RowFiles, decode_choice
from vllm_r3.errors import R3Error
from vllm_r3.send import send

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
INFO = "/routed_experts/info"
VERSIONS = {"/version": "vllm", "/server_info": "sglang", "/get_server_info": "sglang"}
TEXT = (
    "A router picks a few experts for every token, and the trainer must pick the same ones. "
    "Count from one to twelve, name the seas, then say why the order of the layers matters. "
)


@dataclass(frozen=True)
class Reply:
    """An HTTP answer: the status and the parsed body (None where it was no JSON)."""

    status: int
    body: Any

    def why(self) -> str:
        """Say what the server said, in one line."""
        body = self.body if isinstance(self.body, dict) else {}
        error = body.get("error", body.get("detail", body.get("message")))
        message = error.get("message") if isinstance(error, dict) else error
        return f"HTTP {self.status}" + (f", {message}" if message else "")

    def good(self) -> Any:
        """Return the body of an answer that must be a good one."""
        if self.status != 200 or not isinstance(self.body, (dict, list)):
            raise R3Error(f"expected HTTP 200 and a JSON object, got {self.why()}")
        return self.body


@dataclass(frozen=True)
class Connection:
    """A server (`r3`, `vllm` or `sglang`) and what it said at the first contact.

    `info` is the body of `/routed_experts/info`, empty where there is none.
    """

    url: str
    timeout: float = 600.0
    kind: str = ""
    version: str = ""
    model: str | None = None
    max_len: int | None = None  # the longest sequence
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> RouteShape:
        """What the server says of its model."""
        return RouteShape.from_meta(self.info)

    @property
    def files(self) -> RowFiles:
        """Where its files are read."""
        return RowFiles(url=self.url, timeout=self.timeout)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Reply:
        """GET a path without a body, POST with one."""
        try:
            method = "GET" if body is None else "POST"
            status, data = send(method, self.url + path, body, self.timeout)
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise R3Error(f"{self.url}{path}: expected a server, got {reason}") from None
        try:
            return Reply(status, json.loads(data))
        except ValueError:
            return Reply(status, None)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """POST a request for a stream; return its chunks."""
        try:
            status, data = send("POST", self.url + path, body | {"stream": True}, self.timeout)
            lines = [line[5:].strip() for line in data.splitlines() if line.startswith(b"data:")]
            if status == 200 and lines[-1:] == [b"[DONE]"]:
                return [json.loads(line) for line in lines[:-1]]
        except (OSError, ValueError) as error:
            raise R3Error(f"{self.url}{path}: expected a stream, got {error}") from None
        raise R3Error(
            f"{self.url}{path}: expected a stream that ends in [DONE], got HTTP {status}, "
            f"{data[-200:].decode(errors='replace')!r}"
        )

    def prompt(self, length: int, room: int = 16) -> list[int]:
        """Return `length` token ids of plain text, fewer where the model holds fewer."""
        length = length if self.max_len is None else min(length, self.max_len - room)
        if length < 1:
            raise R3Error(
                f"{self.url}: expected room for a prompt, got a limit of {self.max_len} tokens"
            )
        body = self.ask("/tokenize", {"model": self.model, "prompt": TEXT}).body
        some = (body.get("tokens") if isinstance(body, dict) else None) or list(range(3, 60))
        return [some[at % len(some)] for at in range(length)]

    def generate(self, tokens: list[int], max_tokens: int, **more: Any) -> Reply:
        """Generate greedily from token ids, in the server's own dialect."""
        params = {"temperature": 0.0, "ignore_eos": True}
        if self.kind == "sglang":
            params["max_new_tokens"] = max_tokens
            body = {"input_ids": tokens, "sampling_params": params, "return_routed_experts": True}
            return self.ask("/generate", {**body, **more})
        return self.ask(GENERATE, self.body(tokens, max_tokens, **more))

    def body(self, tokens: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """What the generate endpoint takes."""
        params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
        return {"model": self.model, "token_ids": tokens, "sampling_params": params, **more}

    def openai(self, path: str, max_tokens: int, **more: Any) -> Reply:
        """The same through `/v1/completions` (prompt) or `/v1/chat/completions` (messages)."""
        body = {"model": self.model, "max_tokens": max_tokens, "temperature": 0.0}
        return self.ask(path, {**body, "ignore_eos": True, "return_token_ids": True, **more})

    def decode(self, answer: Any, num_prompt: int, **known: Any) -> ChoiceRoutes:
        """Decode the first choice of an answer, with what the server says of its model."""
        known = {"shape": self.shape, "files": self.files, **known}
        return decode_choice(answer, num_prompt=num_prompt, **known)


def connect(url: str, timeout: float = 600.0) -> Connection:
    """Reach a server and learn what it is.

    Raises:
        R3Error: nothing answers there, or nothing that is known.
    """
    server = Connection((url if "://" in url else f"http://{url}").rstrip("/"), timeout)
    info = server.ask(INFO)
    models = server.ask("/v1/models").body
    first = (models.get("data") if isinstance(models, dict) else None) or [{}]
    server = replace(server, model=first[0].get("id"), max_len=first[0].get("max_model_len"))
    if info.status == 200 and isinstance(info.body, dict):
        return replace(server, kind="r3", version=str(info.body.get("version")), info=info.body)
    for path, kind in VERSIONS.items():
        reply = server.ask(path)
        if reply.status == 200 and isinstance(reply.body, dict) and "version" in reply.body:
            return replace(server, kind=kind, version=str(reply.body["version"]))
    raise R3Error(f"{server.url}: expected a vLLM or SGLang server, got no {', '.join(VERSIONS)}")
