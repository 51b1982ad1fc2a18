"""Ask a real server and hold every row of its answers against the oracle.

One `Kit` is one running server. Its readers are written from CONTRACT.md alone and share
no code with the client half of the project: what they accept is what the contract says.

P prompt tokens, G generated tokens of a choice, S = P + G, L layers, K experts chosen.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from cpu_platform import ENV
from engines import seeded_prompts
from forked import ForkedServer
from oracle_checks import check_rows

from vllm_r3.demo.serve import HOST, Server, free_port
from vllm_r3.replay.oracle import Oracle

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
ENDPOINTS = {"generate": GENERATE, "completions": COMPLETIONS, "chat": CHAT}
API_KEY = "tests"  # of a server that asks for one
MODEL_LEN = 1024
GENERATED = "generation_tokens_total"
SERVER_ENV = ENV | {"VLLM_SERVER_DEV_MODE": "1"}  # /pause and /resume
OPTIONS = (
    *("--served-model-name", "tiny", "--dtype", "float32", "--seed", "0"),
    *("--max-model-len", str(MODEL_LEN), "--block-size", "16", "--enforce-eager"),
)


T = TypeVar("T")


@dataclass
class Choice:
    """What an answer, streamed or not, says of one choice."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    rows: Any = None
    prompt_rows: Any = None
    prompt: list[int] | None = None


@dataclass
class Answer:
    """What an answer says, in the field names of the contract."""

    choices: dict[int, Choice]
    prompt_rows: Any = None
    meta: dict[str, Any] | None = None
    prompt: list[int] | None = None


def decode(value: Any, encoding: str, dtype: str) -> np.ndarray:
    """Rows of one field; an empty list has no L and K and stays (0,)."""
    if encoding == "list":
        assert isinstance(value, list), type(value)
        return np.array(value, dtype=dtype)
    assert isinstance(value, str), type(value)
    blob = base64.b64decode(value, validate=True)
    assert blob[:8] == b"\x93NUMPY\x01\x00", blob[:8]
    rows = np.load(io.BytesIO(blob), allow_pickle=False)
    assert rows.dtype.str == {"uint8": "|u1", "int16": "<i2"}[dtype], rows.dtype
    return rows


class Kit:
    """A running server, its address and the oracle of its model."""

    def __init__(
        self, server: Server, model_dir: Path, oracle: Oracle, rows_dir: Path | None = None
    ) -> None:
        self.server, self.model_dir, self.oracle = server, model_dir, oracle
        self.rows_dir = rows_dir
        self.url = f"http://{HOST}:{server.port}"
        key = {"Authorization": f"Bearer {API_KEY}"}
        # Drop an idle connection before the server does (after 5 s), not at the same moment.
        limits = httpx.Limits(keepalive_expiry=2)
        self.client = httpx.Client(base_url=self.url, timeout=120, headers=key, limits=limits)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and parsed body."""
        answer = self.client.post(path, json=body)
        return answer.status_code, answer.json()

    def get(self, path: str) -> Any:
        """Parsed body of a GET that must succeed."""
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, *names: str) -> float:
        """Value of the server's metrics of these names, summed over their labels."""
        lines = self.client.get("/metrics").text.splitlines()
        wanted = tuple(f"vllm:{name}{{" for name in names)
        return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted))

    def generate(self, tokens: list[int], max_tokens: int, **ours: Any) -> Any:
        """Parsed answer with so many greedy tokens, whatever they are."""
        options = dict(max_tokens=max_tokens, ignore_eos=True)
        status, answer = self.post(GENERATE, request("generate", tokens, **options, **ours))
        assert status == 200, answer
        return answer

    def pause(self, mode: str, **more: Any) -> None:
        """Stop the engine's steps."""
        assert self.client.post("/pause", params={"mode": mode} | more).status_code == 200

    def resume(self) -> None:
        """Let it go on."""
        assert self.client.post("/resume").status_code == 200

    def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Parsed chunks of a stream, which must end with [DONE]."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200, lines
        assert lines[-1] == "data: [DONE]", lines[-1][:200]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def ask(self, path: str, body: dict[str, Any], stream: bool = False) -> Answer:
        """Send a request that must succeed and read its answer."""
        if stream:
            return read_chunks(self.chunks(path, body))
        status, answer = self.post(path, body)
        assert status == 200, answer
        return read_answer(answer)

    def check(self, path: str, body: dict[str, Any], stream: bool = False) -> Answer:
        """Ask, then compare every row of every choice with the oracle, by value."""
        answer = self.ask(path, body, stream)
        meta = answer.meta
        assert meta is not None, "no routed_experts_meta"
        assert meta["start"] == (body.get("routed_experts_prompt_start") or 0)
        for index, choice in sorted(answer.choices.items()):
            where = f"{path} choice {index}"
            prompt = choice.prompt or answer.prompt or body["token_ids"]
            self.check_choice(answer, choice, prompt, where)
        return answer

    def check_choice(self, answer: Answer, choice: Choice, prompt: list[int], where: str) -> None:
        """Compare one choice, whatever its layout and encoding."""
        meta = answer.meta
        assert meta is not None
        start, num_prompt = meta["start"], len(prompt)
        sides = (meta["num_layers"], meta["top_k"])
        rows = self.decode(choice.rows, meta).reshape(-1, *sides)
        if meta["layout"] == "full":
            assert answer.prompt_rows is None and choice.prompt_rows is None, where
            prompt_rows, rows = rows[: num_prompt - start], rows[num_prompt - start :]
        else:
            found = answer.prompt_rows if choice.prompt_rows is None else choice.prompt_rows
            prompt_rows = self.decode(found, meta).reshape(-1, *sides)
        truth = self.oracle.truth([*prompt, *choice.tokens])
        check_rows(self.oracle, truth, num_prompt, prompt_rows, rows, start, where)

    def decode(self, value: Any, meta: dict[str, Any]) -> np.ndarray:
        """Rows of one field, in any encoding."""
        if meta["encoding"] != "file":
            return decode(value, meta["encoding"], meta["dtype"])
        assert self.rows_dir and value["name"] == Path(value["name"]).name
        data = (self.rows_dir / value["name"]).read_bytes()
        assert value | {"name": ""} == file_facts(data)
        return decode(base64.b64encode(data).decode(), "npy", meta["dtype"])


def file_facts(data: bytes) -> dict[str, Any]:
    """What an answer says of a file with these bytes, but for its name."""
    return {"name": "", "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait until the server is in a state."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def aborted(kit: Kit, ask: Callable[[], T], is_aborted: Callable[[T], bool]) -> T:
    """Return the answer to a long request that the server aborts after its first tokens.

    The engine is frozen as soon as it has generated some, then told to abort what it has. Only if
    this process slept through all of the request's tokens, it is asked once more.
    """
    for _ in range(5):
        under_way = kit.metric(GENERATED) + 8
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(ask)
            wait_for(lambda: job.done() or kit.metric(GENERATED) >= under_way, "tokens")  # noqa: B023
            kit.pause("keep", clear_cache=False)
            kit.pause("abort")
            answer = job.result()
        kit.resume()
        if is_aborted(answer):
            return answer
    raise AssertionError("in 5 attempts no request was aborted between two tokens")


def read_answer(answer: dict[str, Any]) -> Answer:
    """Read an answer that was not streamed."""
    return Answer(
        choices={choice["index"]: _read_choice(Choice(), choice) for choice in answer["choices"]},
        prompt_rows=answer.get("prompt_routed_experts"),
        meta=answer.get("routed_experts_meta"),
        prompt=answer.get("prompt_token_ids"),
    )


def read_chunks(chunks: list[dict[str, Any]]) -> Answer:
    """Fold a stream; rows stand whole on the chunk that ends a choice, prompt rows once."""
    answer = Answer(choices={})
    for chunk in chunks:
        assert "error" not in chunk, chunk
        ends = [c for c in chunk["choices"] if c.get("finish_reason") is not None]
        if "prompt_routed_experts" in chunk:
            assert answer.prompt_rows is None, "prompt_routed_experts sent twice"
            answer.prompt_rows = chunk["prompt_routed_experts"]
        assert bool(ends) or not any("routed_experts" in name for name in chunk), chunk
        answer.meta = chunk.get("routed_experts_meta", answer.meta)
        answer.prompt = answer.prompt or chunk.get("prompt_token_ids")
        for part in chunk["choices"]:
            choice = answer.choices.setdefault(part["index"], Choice())
            assert choice.finish_reason is None, "a chunk after the finish_reason"
            assert part in ends or "routed_experts" not in part, part
            _read_choice(choice, part)
    return answer


def _read_choice(choice: Choice, part: dict[str, Any]) -> Choice:
    message = part.get("message") or part.get("delta") or {}
    choice.tokens += part.get("token_ids") or []
    choice.text += part.get("text") or message.get("content") or ""
    choice.finish_reason = part.get("finish_reason")
    choice.stop_reason = part.get("stop_reason")
    choice.rows = part.get("routed_experts")
    choice.prompt_rows = part.get("prompt_routed_experts")
    choice.prompt = choice.prompt or part.get("prompt_token_ids")
    return choice


def request(endpoint: str, prompt: list[int], **options: Any) -> dict[str, Any]:
    """Body for an endpoint, greedy unless told otherwise.

    Sampling options go where the endpoint has them; those named in OURS stay on top. The
    chat endpoint takes no tokens, so there the prompt is spelled out as letters.
    """
    ours = {name: options.pop(name) for name in OURS if name in options}
    sampling = {"temperature": 0.0, "max_tokens": 12} | options
    if endpoint == "generate":
        return {"token_ids": prompt, "sampling_params": sampling} | ours
    body = {"model": "tiny", "return_token_ids": True} | sampling | ours
    if endpoint == "completions":
        return {"prompt": prompt} | body
    words = "".join(chr(97 + token % 26) for token in prompt)
    return {"messages": [{"role": "user", "content": words}]} | body


OURS = (
    "return_routed_experts",
    "routed_experts_prompt_start",
    "routed_experts_encoding",
    "routed_experts_layout",
    "routed_experts_stream",
)


def seeded_prompt(seed: int, length: int) -> list[int]:
    """A random prompt without special tokens, the same for the same seed."""
    return seeded_prompts(seed, [length])[0]


@contextlib.contextmanager
def serving(
    model: Path,
    oracle: Oracle,
    log_path: Path,
    *options: str,
    experts: bool = True,
    data_parallel: bool = False,
    rows_dir: bool = False,
) -> Iterator[Kit]:
    """Run a server for the duration, with a directory for rows if told so."""
    flags = ("--enable-return-routed-experts",) if experts else ()
    directory = log_path.with_suffix(".rows") if rows_dir else None
    if directory:
        directory.mkdir(exist_ok=True)
        flags += ("--routed-experts-dir", str(directory))
    env = SERVER_ENV | {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    more: dict[str, Any] = dict(log_path=log_path, env=env, data_parallel=data_parallel)
    with ForkedServer(model, *OPTIONS, *flags, *options, **more) as server:
        yield Kit(server, model, oracle, directory)
