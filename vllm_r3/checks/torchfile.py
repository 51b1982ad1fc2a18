"""Load torch files without running what is in them.

`torch.load(weights_only=True)` with numpy's array types allowed beside its own; anything else in
the file is refused by name. Needs torch, imported when called.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from vllm_r3.errors import R3Error


def load(path: str | Path) -> Any:
    """Return what the file holds: plain containers, numbers, strings, tensors and numpy arrays.

    Raises:
        R3Error: no such file, no torch, not a torch file, or one that holds other objects.
    """
    torch = _torch()
    if not Path(path).is_file():
        raise R3Error(f"{path}: expected a torch file, found none")
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise R3Error(f"{path}: {_refusal(str(error))}") from None
    except Exception as error:  # a damaged file makes the restricted reader raise anything
        raise R3Error(f"{path}: expected a torch file, got an unreadable one: {error!r}") from None


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise R3Error(f"torch files need torch ({error}): pip install 'vllm-r3[replay]'") from None
    return torch


def _numpy_globals() -> list[Any]:
    """The names that numpy arrays and scalars of numbers are pickled with, in numpy 1 and 2."""
    allowed: list[Any] = [np.ndarray, np.dtype]
    dtypes = getattr(np, "dtypes", None)
    for name in dir(dtypes) if dtypes is not None else []:
        if name.endswith("DType") and not name.startswith(("Object", "Void")):
            allowed.append(getattr(dtypes, name))
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        with contextlib.suppress(ImportError, AttributeError):
            core = __import__(module, fromlist=["_reconstruct", "scalar"])
            allowed += [
                (core._reconstruct, f"{module}._reconstruct"),
                (core.scalar, f"{module}.scalar"),
            ]
    return allowed


def _refusal(message: str) -> str:
    found = re.search(r"GLOBAL (\S+)|but got <class '([^']+)'>", message)
    if found is None:
        return "expected a torch file, got one that its restricted reader refuses"
    name = found.group(1) or found.group(2)
    return f"expected plain data, tensors and numpy arrays, got {name}, which is not loaded"
