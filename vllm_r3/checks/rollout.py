"""Check a rollout file: does every sample hold rows that a trainer can replay?

Reads slime's and vime's debug files, `{"rollout_id": ..., "samples": [{...}, ...]}` as written by
`--save-debug-rollout-data`, without running what is in them, and gives one verdict a sample. Needs
torch to read the file, imported when called.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_r3.adapters.slime import FIELD, held_rows
from vllm_r3.checks.rows import find_problems
from vllm_r3.client.shape import RouteShape
from vllm_r3.errors import R3Error

OK, MISSING, ABORTED = "ok", "missing", "aborted without rows"


@dataclass(frozen=True)
class Verdict:
    """One sample's verdict: its name, `ok` or what is wrong, and the details."""

    sample: str
    kind: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class RolloutReport:
    """All verdicts and whether the file passes."""

    path: str
    verdicts: list[Verdict]
    min_with_routing: int | None

    @property
    def with_routing(self) -> int:
        """Samples that hold rows, right or wrong."""
        return sum(verdict.kind not in (MISSING, ABORTED) for verdict in self.verdicts)

    @property
    def broken(self) -> list[Verdict]:
        """Samples that hold wrong rows, or none though one was needed."""
        excused = (OK, ABORTED) if self.min_with_routing is None else (OK, ABORTED, MISSING)
        return [verdict for verdict in self.verdicts if verdict.kind not in excused]

    @property
    def passed(self) -> bool:
        """Return whether none is broken and as many hold rows as were asked for."""
        needed = 1 if self.min_with_routing is None else self.min_with_routing
        return self.with_routing >= needed and not self.broken

    def lines(self, good_ones: bool = False) -> list[str]:
        """The report as text: one line a broken (or each good) sample, then the sums."""
        text = [f"{v.sample}: {v.kind}" for v in self.verdicts if good_ones and v.kind == OK]
        for verdict in self.broken:
            text.append(f"{verdict.sample}: {verdict.kind}")
            text += [f"  {detail}" for detail in verdict.details]
        counts, found = Counter(v.kind for v in self.verdicts), self.with_routing
        text.append(f"{self.path}: {len(self.verdicts)} samples, {found} with routing")
        text += [f"  {count} {kind}" for kind, count in sorted(counts.items())]
        if found < (self.min_with_routing or 0):
            least = self.min_with_routing
            text.append(f"expected at least {least} samples with routing, got {found}")
        return text


def verify_rollout(
    path: str | Path, shape: RouteShape, min_with_routing: int | None = None
) -> RolloutReport:
    """Judge every sample of a debug-rollout file.

    `min_with_routing` samples must hold rows; default: all that were not aborted.

    Raises:
        R3Error: the file cannot be read or holds no samples.
    """
    samples = load_samples(path)
    verdicts = [judge(sample, shape, index) for index, sample in enumerate(samples)]
    return RolloutReport(str(path), verdicts, min_with_routing)


def load_samples(path: str | Path) -> list[Mapping[str, Any]]:
    """Read the samples of a debug-rollout file."""
    content = load_torch_file(path)
    samples = content.get("samples") if isinstance(content, Mapping) else content
    if not isinstance(samples, Sequence) or not all(isinstance(s, Mapping) for s in samples):
        named = f"a dict of {sorted(map(str, content))}" if isinstance(content, Mapping) else ""
        raise R3Error(
            f"{path}: expected {{'rollout_id': ..., 'samples': [...]}}, got "
            f"{named or type(content).__name__}"
        )
    if not samples:
        raise R3Error(f"{path}: expected samples, got an empty list")
    return list(samples)


def judge(sample: Mapping[str, Any], shape: RouteShape, index: int = 0) -> Verdict:
    """Give one sample's verdict: shape first, then values."""
    name = f"sample {sample.get('index', index)}"
    value = sample.get(FIELD)
    if value is None or (isinstance(value, (list, tuple)) and not value):
        kind = ABORTED if sample.get("status") == "aborted" else MISSING
        return Verdict(name, kind, (f"{FIELD} is {value!r}",))
    rows, tokens = held_rows(value), len(sample.get("tokens") or [])
    expected = (max(0, tokens - 1), shape.num_layers, shape.top_k)
    told = (f"expected {expected} for {tokens} tokens, got {rows.shape}",)
    if rows.ndim != 3:
        return Verdict(name, "wrong rank", told)
    if rows.dtype.kind not in "iu":
        return Verdict(name, "wrong dtype", (f"expected integers, got {rows.dtype}",))
    for axis, kind in enumerate(("wrong rows", "wrong layers", "wrong top-k")):
        if expected[axis] not in (None, rows.shape[axis]):
            return Verdict(name, kind, told)
    problems = find_problems(rows, shape)
    details = tuple(f"{kind}: {what}" for kind, what in problems.items())
    return Verdict(name, next(iter(problems), OK), details)


def load_torch_file(path: str | Path) -> Any:
    """Return what a torch file holds: containers, numbers, strings, tensors and numpy arrays.

    Raises:
        R3Error: no such file, no torch, not a torch file, or one that holds other objects.
    """
    try:
        import torch
    except ImportError as error:
        raise R3Error(f"torch files need torch ({error}): pip install 'vllm-r3[replay]'") from None
    if not Path(path).is_file():
        raise R3Error(f"{path}: expected a torch file, found none")
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)|but got <class '([^']+)'>", str(error))
        name = found.group(1) or found.group(2) if found else "what its restricted reader refuses"
        raise R3Error(
            f"{path}: expected plain data, tensors and numpy arrays, got {name}, which is not "
            "loaded"
        ) from None
    except Exception as error:  # a damaged file makes the restricted reader raise anything
        raise R3Error(f"{path}: expected a torch file, got an unreadable one: {error!r}") from None


def _numpy_globals() -> list[Any]:
    """The names that numpy arrays and scalars of numbers are pickled with, in numpy 1 and 2."""
    named = [name for name in dir(np.dtypes) if re.match("(?!Object|Void).*DType$", name)]
    allowed = [np.ndarray, np.dtype, *(getattr(np.dtypes, name) for name in named)]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        with contextlib.suppress(ImportError, AttributeError):
            core = importlib.import_module(module)
            for name in ("_reconstruct", "scalar"):
                allowed.append((getattr(core, name), f"{module}.{name}"))
    return allowed
