# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Counts of routed experts reach their metrics, engine by engine."""

from typing import Any

from vllm.v1.metrics.routed_experts import RoutedExpertsProm, RoutedExpertsStats


class FakeMetric:
    """Remembers each sample by metric name and engine."""

    seen: dict[tuple[str, str], float] = {}

    def __init__(self, name: str, **kwargs: Any) -> None:
        self.name = name
        self.engine = ""

    def labels(self, model: str, engine: str) -> "FakeMetric":
        child = FakeMetric(self.name)
        child.engine = engine
        return child

    def inc(self, value: float) -> None:
        key = self.name, self.engine
        self.seen[key] = self.seen.get(key, 0) + value

    def set(self, value: float) -> None:
        self.seen[self.name, self.engine] = value


def test_counters_add_up_and_the_gauge_is_set():
    FakeMetric.seen = {}
    labels = {0: ["m", "0"], 1: ["m", "1"]}
    prom = RoutedExpertsProm(FakeMetric, FakeMetric, ["model", "engine"], labels)
    stats = RoutedExpertsStats(
        num_rows_stored=5,
        num_rows_returned=3,
        num_bytes_returned=48,
        num_old_rows_returned=2,
        num_invalid_reads=1,
        table_bytes=1000,
        tier_bytes=500,
    )
    prom.observe(stats, engine_idx=1)
    prom.observe(stats, engine_idx=1)
    assert FakeMetric.seen == {
        ("vllm:routed_experts_rows_stored", "1"): 10,
        ("vllm:routed_experts_rows_returned", "1"): 6,
        ("vllm:routed_experts_old_rows_returned", "1"): 4,
        ("vllm:routed_experts_bytes_returned", "1"): 96,
        ("vllm:routed_experts_invalid_reads", "1"): 2,
        ("vllm:routed_experts_table_bytes", "1"): 1000,
        ("vllm:routed_experts_tier_bytes", "1"): 500,
    }
