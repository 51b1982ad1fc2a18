"""Check a rollout file: does every sample hold rows that a trainer can replay?

Reads slime's and vime's debug files, `{"rollout_id": ..., "samples": [{...}, ...]}` as written by
`--save-debug-rollout-data`, and gives one verdict a sample. Needs torch to read the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_r3.adapters.slime import FIELD, held_rows
from vllm_r3.checks import torchfile
from vllm_r3.checks.values import find_problems
from vllm_r3.client.shape import RouteShape
from vllm_r3.errors import R3Error

OK, MISSING = "ok", "missing"


@dataclass(frozen=True)
class Verdict:
    """One sample's verdict: its name, `ok`, `missing` or what is wrong, and the details."""

    sample: str
    kind: str
    details: tuple[str, ...] = ()
    aborted: bool = False


@dataclass(frozen=True)
class RolloutReport:
    """All verdicts and whether the file passes."""

    path: str
    verdicts: list[Verdict]
    min_with_routing: int | None

    @property
    def with_routing(self) -> int:
        """Samples that hold rows, right or wrong."""
        return sum(verdict.kind != MISSING for verdict in self.verdicts)

    @property
    def broken(self) -> list[Verdict]:
        """Samples that hold wrong rows, or none though one was needed."""
        needed = self.min_with_routing is None
        return [
            v
            for v in self.verdicts
            if v.kind != OK and (v.kind != MISSING or (needed and not v.aborted))
        ]

    @property
    def passed(self) -> bool:
        """No broken sample, and rows in as many samples as were asked for."""
        enough = self.with_routing >= (
            1 if self.min_with_routing is None else self.min_with_routing
        )
        return enough and not self.broken

    def lines(self) -> list[str]:
        """The report as text: one line a broken sample, then the sums."""
        text = []
        for verdict in self.broken:
            text.append(f"{verdict.sample}: {verdict.kind}")
            text += [f"  {detail}" for detail in verdict.details]
        counts = Counter(verdict.kind for verdict in self.verdicts)
        text.append(f"{self.path}: {len(self.verdicts)} samples, {self.with_routing} with routing")
        text += [f"  {count} {kind}" for kind, count in sorted(counts.items())]
        if self.min_with_routing is not None and self.with_routing < self.min_with_routing:
            text.append(
                f"expected at least {self.min_with_routing} samples with routing, got "
                f"{self.with_routing}"
            )
        return text


def verify_rollout(
    path: str | Path, shape: RouteShape, min_with_routing: int | None = None
) -> RolloutReport:
    """Judge every sample of a file.

    Args:
        path: a debug-rollout file.
        shape: the trainer's model; num_layers and top_k are needed.
        min_with_routing: how many samples must hold rows; default: all that were not aborted.

    Raises:
        R3Error: the file cannot be read or holds no samples.
    """
    samples = load_samples(path)
    verdicts = [judge(sample, shape, index) for index, sample in enumerate(samples)]
    return RolloutReport(str(path), verdicts, min_with_routing)


def load_samples(path: str | Path) -> list[Mapping[str, Any]]:
    """Read the samples of a debug-rollout file."""
    content = torchfile.load(path)
    samples = content.get("samples") if isinstance(content, Mapping) else content
    if not isinstance(samples, Sequence) or not all(
        isinstance(sample, Mapping) for sample in samples
    ):
        raise R3Error(
            f"{path}: expected {{'rollout_id': ..., 'samples': [...]}}, got {_describe(content)}"
        )
    if not samples:
        raise R3Error(f"{path}: expected samples, got an empty list")
    return list(samples)


def _describe(content: Any) -> str:
    if isinstance(content, Mapping):
        return f"a dict of {sorted(map(str, content))}"
    return type(content).__name__


def judge(sample: Mapping[str, Any], shape: RouteShape, index: int = 0) -> Verdict:
    """Give one sample's verdict: shape first, then values."""
    name = f"sample {sample.get('index', index)}"
    aborted = sample.get("status") == "aborted"
    value = sample.get(FIELD)
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return Verdict(name, MISSING, (f"{FIELD} is {value!r}",), aborted)
    rows = held_rows(value)
    kind, detail = _misfit(rows, len(sample.get("tokens") or []), shape)
    if kind:
        return Verdict(name, kind, (detail,), aborted)
    problems = find_problems(rows, shape)
    if problems:
        return Verdict(name, problems[0].kind, tuple(map(str, problems)), aborted)
    return Verdict(name, OK, (), aborted)


def _misfit(rows: np.ndarray, tokens: int, shape: RouteShape) -> tuple[str, str]:
    expected = (max(0, tokens - 1), shape.num_layers, shape.top_k)
    told = f"expected {expected} for {tokens} tokens, got {rows.shape}"
    if rows.ndim != 3:
        return "wrong rank", told
    if rows.dtype.kind not in "iu":
        return "wrong dtype", f"expected integers, got {rows.dtype}"
    for axis, kind in enumerate(("wrong rows", "wrong layers", "wrong top-k")):
        if expected[axis] is not None and rows.shape[axis] != expected[axis]:
            return kind, told
    return "", ""
