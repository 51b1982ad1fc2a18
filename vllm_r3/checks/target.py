"""A server under test, whichever it is: what it says of itself, and one request in its own dialect.

Knows this project's servers, stock vLLM and SGLang. It imports numpy and the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_r3.checks.connect import TEXT, Http, Reply
from vllm_r3.client import ChoiceRoutes, RouteShape, decode_choice
from vllm_r3.errors import R3Error

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
INFO = "/routed_experts/info"


@dataclass(frozen=True)
class Target:
    """A server and what it said at the first contact.

    Attributes:
        kind: `r3`, `vllm` or `sglang`.
        info: the body of `/routed_experts/info`, empty where there is none.
        model: the served model's name.
        max_len: the longest sequence, None where unknown.
    """

    http: Http
    kind: str
    version: str
    model: str | None
    max_len: int | None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> RouteShape:
        """What the server says of its model."""
        return RouteShape.from_meta(self.info)

    def prompt(self, length: int, room: int = 16) -> list[int]:
        """Return `length` token ids of plain text, fewer where the model holds fewer."""
        if self.max_len is not None:
            length = min(length, self.max_len - room)
        if length < 1:
            raise R3Error(
                f"{self.http.url}: expected room for a prompt, got a limit of {self.max_len} tokens"
            )
        reply = self.http.post("/tokenize", {"model": self.model, "prompt": TEXT})
        body = reply.body if isinstance(reply.body, dict) else {}
        some = body.get("tokens") or list(range(3, 60))
        return [some[at % len(some)] for at in range(length)]

    def generate(self, tokens: list[int], max_tokens: int, **more: Any) -> Reply:
        """Generate greedily from token ids, in the server's own dialect."""
        if self.kind == "sglang":
            params = {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
            body = {"input_ids": tokens, "sampling_params": params, "return_routed_experts": True}
            return self.http.post("/generate", {**body, **more})
        params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"model": self.model, "token_ids": tokens, "sampling_params": params}
        return self.http.post(GENERATE, {**body, **more})

    def complete(self, tokens: list[int], max_tokens: int, **more: Any) -> Reply:
        """The same through `/v1/completions`."""
        body = {"prompt": tokens, "max_tokens": max_tokens, **self._openai()}
        return self.http.post(COMPLETIONS, {**body, **more})

    def chat(self, text: str, max_tokens: int, **more: Any) -> Reply:
        """One message through `/v1/chat/completions`."""
        message = {"role": "user", "content": text}
        body = {"messages": [message], "max_tokens": max_tokens, **self._openai()}
        return self.http.post(CHAT, {**body, **more})

    def _openai(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def routes(
        self, reply: Reply, num_prompt: int | None, shape: RouteShape | None = None, **more: Any
    ) -> ChoiceRoutes:
        """Decode the first choice of a reply, or say why that cannot be."""
        if reply.status != 200:
            raise R3Error(f"{self.http.url}: expected HTTP 200, got {reply.why()}")
        return decode_choice(reply.body, num_prompt=num_prompt, shape=shape or self.shape, **more)


def connect(url: str, timeout: float = 600.0) -> Target:
    """Reach a server and learn what it is.

    Raises:
        R3Error: nothing answers there, or nothing that is known.
    """
    http = Http(url, timeout)
    info = http.get(INFO)
    models = http.get("/v1/models")
    model, max_len = _first_model(models.body)
    version = http.get("/version")
    if info.status == 200 and isinstance(info.body, dict):
        return Target(http, "r3", str(info.body.get("version")), model, max_len, info.body)
    if version.status == 200 and isinstance(version.body, dict) and "version" in version.body:
        return Target(http, "vllm", str(version.body["version"]), model, max_len)
    for path in ("/server_info", "/get_server_info"):
        reply = http.get(path)
        if reply.status == 200 and isinstance(reply.body, dict):
            return Target(http, "sglang", str(reply.body.get("version")), model, max_len)
    raise R3Error(
        f"{http.url}: expected a vLLM or SGLang server, got {version.why()} from /version"
    )


def _first_model(body: Any) -> tuple[str | None, int | None]:
    data = body.get("data") if isinstance(body, dict) else None
    first = data[0] if data else {}
    return first.get("id"), first.get("max_model_len")
