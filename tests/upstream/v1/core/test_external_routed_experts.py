# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of tokens whose KV cache a connector loads from outside."""

from unittest.mock import MagicMock

import numpy as np
import pytest

from scheduling import BLOCK_SIZE, INFO, Engine, make_engine, row
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput

PROMPT = list(range(100, 100 + 5 * BLOCK_SIZE + 1))
NUM_STORED = 4 * BLOCK_SIZE
ELSEWHERE = -7  # "step" of rows that another engine computed


class Store(KVConnectorBase_V1):
    """Has the KV of the first tokens of every prompt, and their rows or not.

    Args:
        engine: Whose worker's KV cache the store loads into.
        has_rows: Whether the rows come with the KV.
        is_async: Whether a load takes a step of its own.
    """

    def __init__(self, engine: Engine, has_rows: bool, is_async: bool) -> None:
        self.engine, self.has_rows, self.is_async = engine, has_rows, is_async
        self.num_loaded: dict[str, int] = {}
        self.loading: set[str] = set()
        engine.scheduler.connector = self
        engine.scheduler.init_routed_experts(INFO)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        is_new = request.request_id not in self.num_loaded
        count = max(0, NUM_STORED - num_computed_tokens) if is_new else 0
        return count, self.is_async and count > 0

    def get_routed_experts(self, request, start, stop):
        rows = [row(request.all_token_ids[i], i, ELSEWHERE) for i in range(start, stop)]
        return np.array(rows, INFO.dtype) if self.has_rows else None

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if request.request_id in self.num_loaded:
            return
        self.num_loaded[request.request_id] = num_external_tokens
        stop = NUM_STORED if num_external_tokens else 0
        for i in range(stop - num_external_tokens, stop):
            slot = blocks.get_block_ids()[0][i // BLOCK_SIZE] * BLOCK_SIZE
            self.engine.runner.kv_cache[0, slot + i % BLOCK_SIZE] = row(
                request.all_token_ids[i], i, ELSEWHERE
            )
        if self.is_async and num_external_tokens:
            self.loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output):
        return None

    def request_finished(self, request, block_ids):
        return False, None

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = MagicMock()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(request, model: str) -> Engine:
    return make_engine(model, 24, is_async=request.param)


def finish_loads(engine: Engine, store: Store) -> None:
    """Run the engine; every load ends with the step after the one that began it."""
    collect = engine.collect

    def collect_and_load() -> None:
        scheduled, output, led_to = engine.in_flight[0]
        output.kv_connector_output = KVConnectorOutput(
            finished_recving=set(store.loading)
        )
        store.loading.clear()
        collect()

    engine.collect = collect_and_load
    engine.run()


@pytest.mark.parametrize("loads_async", [False, True])
def test_rows_come_with_the_kv(engine: Engine, loads_async: bool) -> None:
    # Blocks have had owners before, whose rows are still in the table.
    for name in "ab":
        engine.add(name, [int(token) + ord(name) for token in PROMPT])
    engine.run()
    engine.reset()
    store = Store(engine, has_rows=True, is_async=loads_async)
    engine.add("loaded", PROMPT)
    finish_loads(engine, store)
    assert store.num_loaded["loaded"] == NUM_STORED
    engine.assert_rows("loaded")
    steps = engine.answers["loaded"].rows[:, 0, 3]
    assert (steps[:NUM_STORED] == ELSEWHERE).all()
    assert (steps[NUM_STORED:] > 0).all()


@pytest.mark.parametrize("loads_async", [False, True])
def test_kv_without_rows_is_no_hit(engine: Engine, loads_async: bool) -> None:
    store = Store(engine, has_rows=False, is_async=loads_async)
    engine.add("computed", PROMPT)
    finish_loads(engine, store)
    assert store.num_loaded["computed"] == 0
    engine.assert_rows("computed")


@pytest.mark.parametrize("loads_async", [False, True])
def test_cached_blocks_without_rows_are_no_hit(
    engine: Engine, loads_async: bool
) -> None:
    """A request that wants no rows may load without; the next one must not see it."""
    store = Store(engine, has_rows=False, is_async=loads_async)
    engine.add("unasked", PROMPT, return_routed_experts=False)
    finish_loads(engine, store)
    assert store.num_loaded["unasked"] == NUM_STORED
    for name in ("first", "second"):
        engine.add(name, PROMPT)
        finish_loads(engine, store)
        engine.assert_rows(name)
    # Not computed again, once there are blocks with rows.
    hits = [engine.runner.passes[name][0][0] for name in ("unasked", "first", "second")]
    assert hits == [NUM_STORED, 0, 5 * BLOCK_SIZE]


def test_a_block_whose_rows_are_on_their_way_is_a_hit(engine: Engine) -> None:
    """Its rows come with the step that fills it, after the hit."""
    store = Store(engine, has_rows=True, is_async=False)
    engine.add("a", PROMPT)
    engine.add("b", PROMPT)
    finish_loads(engine, store)
    assert engine.runner.passes["b"][0][0] == 5 * BLOCK_SIZE
    engine.assert_all_rows()
