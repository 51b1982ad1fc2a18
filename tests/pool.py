"""Engines and servers of the tests: each configuration starts once, and ends with its last test.

CONFIGURATIONS names them. A test uses one by an argument of its name, or by that name as a
parameter of `running`; tests are sorted by what they use. Whatever else starts an engine or a
server says so with `count_start`: their number stands below the test report.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engines import engine
from server_fixture import API_KEY, Kit, serving

from vllm_r3.replay.oracle import Oracle

Models = Callable[[str], Path]
Oracles = Callable[[str], Oracle]
STARTS: list[tuple[str, float]] = []


@contextlib.contextmanager
def count_start(name: str) -> Iterator[None]:
    """Count an engine or a server whose start takes the duration."""
    begin = time.monotonic()
    try:
        yield
    finally:
        STARTS.append((name, time.monotonic() - begin))


@dataclass(frozen=True)
class InProcess:
    """An `Engine` on a kind of model, with options of `engines.engine`."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    draft: str = ""  # a kind of model, for options["speculative_config"]

    def start(self, models: Models, oracles: Oracles, log: Path) -> Any:
        """Return the engine's context."""
        options = dict(self.options)
        if self.draft:
            options["speculative_config"] = options["speculative_config"] | {
                "model": str(models(self.draft))
            }
        return engine(models(self.kind), oracles(self.kind), **options)


@dataclass(frozen=True)
class Serve:
    """A `Kit` on a kind of model, with options of `vllm serve`."""

    kind: str
    options: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)  # of `server_fixture.serving`

    def start(
        self, models: Models, oracles: Oracles, log: Path
    ) -> contextlib.AbstractContextManager[Kit]:
        """Return the server's context."""
        return serving(models(self.kind), oracles(self.kind), log, *self.options, **self.more)


FILE_TTL, DIR_BYTES = 6, 60_000  # seconds, bytes: less than 200 answers have
CHUNKS = dict(max_num_batched_tokens=40)  # prompts are prefilled in chunks that end inside blocks


def drafts(method: str, **more: Any) -> dict[str, Any]:
    """Options of an engine that drafts three tokens a step."""
    speculation = dict(method=method, num_speculative_tokens=3) | more
    return dict(max_num_batched_tokens=64, speculative_config=speculation)


TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


CONFIGURATIONS: dict[str, InProcess | Serve] = {
    "moe": InProcess("moe", CHUNKS),
    "moe-async": InProcess("moe", CHUNKS | dict(is_async=True)),
    # two groups of KV-cache layers that share a pool of blocks
    "exaone": InProcess("exaone", dict(num_gpu_blocks_override=200, max_num_batched_tokens=64)),
    # MoE layers 1 and 2 in one stage, 4 in the other
    "two-stages": InProcess("dense-between", CHUNKS | dict(pipeline_parallel_size=2)),
    "mixtral-two-ranks": InProcess("mixtral", dict(tensor_parallel_size=2)),
    "olmoe-compiled": InProcess("olmoe", dict(compiled=True, routed_experts_layout="full")),
    "qwen2-ngram": InProcess("qwen2", drafts("ngram", prompt_lookup_max=3, prompt_lookup_min=1)),
    "moe-draft-model": InProcess("moe", drafts("draft_model"), draft="draft"),
    "eagle": InProcess("drafted-moe", drafts("eagle"), draft="eagle"),
    "glm4-mtp": InProcess("drafted-glm4", drafts("mtp")),
    "kit": Serve("dense-between", (), dict(rows_dir=True)),
    "flagged": Serve(
        "wide",
        (
            *("--routed-experts-encoding", "list", "--routed-experts-layout", "full"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--reasoning-parser", "granite"),
        ),
    ),
    "off": Serve("moe", ("--max-num-batched-tokens", "64"), dict(experts=False)),
    # with two API processes
    "two_ranks": Serve(
        "moe",
        (
            *("--data-parallel-size", "2", "--max-num-batched-tokens", "64"),
            *("--api-key", API_KEY, "--routed-experts-file-ttl", str(FILE_TTL)),
            *("--routed-experts-dir-bytes", str(DIR_BYTES)),
        ),
        dict(data_parallel=True, rows_dir=True),
    ),
    "prefiller": Serve("dense-between", ("--kv-transfer-config", json.dumps(TRANSFER))),
    # few blocks, so that each soon has another owner
    "decoder": Serve(
        "dense-between",
        (
            *("--kv-transfer-config", json.dumps(TRANSFER | RECOMPUTE)),
            *("--num-gpu-blocks-override", "100"),
        ),
    ),
    "bfloat16": Serve("moe", ("--dtype", "bfloat16")),
}


class Pool:
    """What runs, by configuration."""

    def __init__(self, models: Models, oracles: Oracles, logs: Path) -> None:
        self._models, self._oracles, self._logs = models, oracles, logs
        self._running: dict[str, tuple[contextlib.ExitStack, Any]] = {}
        self._failed: dict[str, BaseException] = {}

    def get(self, name: str) -> Any:
        """Return what runs in a configuration; start it if it does not."""
        if name in self._failed:
            raise self._failed[name]
        if name not in self._running:
            log, stack = self._logs / f"{name}.log", contextlib.ExitStack()
            configuration = CONFIGURATIONS[name]
            run = configuration.start(self._models, self._oracles, log)
            try:
                with count_start(name):
                    self._running[name] = stack, stack.enter_context(run)
            except BaseException as error:
                self._failed[name] = error
                raise
        return self._running[name][1]

    def stop(self, name: str) -> None:
        """Stop what runs in a configuration, if it does."""
        if name in self._running:
            self._running.pop(name)[0].close()

    def stop_all(self) -> None:
        """Stop everything."""
        for name in list(self._running):
            self.stop(name)


def used_by(item: pytest.Item) -> list[str]:
    """Configurations that a test uses."""
    call = getattr(item, "callspec", None)
    given = [v for v in call.params.values() if isinstance(v, str)] if call else []
    return [n for n in (*getattr(item, "fixturenames", ()), *given) if n in CONFIGURATIONS]


def sort_by_use(items: list[pytest.Item]) -> None:
    """Put tests that use the same next to each other, in the order of the first of each."""
    used = {item: tuple(used_by(item)) or (str(item.path),) for item in items}
    places: dict[tuple[str, ...], int] = {}
    for what in used.values():
        places.setdefault(what, len(places))
    items.sort(key=lambda item: places[used[item]])
