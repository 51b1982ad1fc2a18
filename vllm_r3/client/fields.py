"""Take typed values out of parsed JSON, where anything may stand anywhere.

A missing field and null are both None; a value of another kind is a RoutesError that names it. It
imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_r3.errors import R3Error

LARGEST = 1 << 40


class RoutesError(R3Error):
    """Rows that are missing, misshapen or impossible; says where, what was expected and found."""


def integer(holder: Mapping[str, Any], name: str, where: str) -> int | None:
    """Read a count or a number of 0 or more."""
    value = holder.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise _other(where, name, "an integer of 0 or more", value)
    return value


def integers(holder: Mapping[str, Any], name: str, where: str) -> list[int] | None:
    """Read a list of integers, such as token ids."""
    value = holder.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise _other(where, name, "a list of integers", value)
    return value


def mapping(holder: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """Read an object; empty where it is missing."""
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _other(where, name, "an object", value)
    return value


def objects(holder: Mapping[str, Any], name: str, where: str) -> list[Mapping[str, Any]]:
    """Read a list of objects; empty where it is missing."""
    value = holder.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise _other(where, name, "a list of objects", value)
    return value


def text(holder: Mapping[str, Any], name: str, where: str) -> str | None:
    """Read a string."""
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise _other(where, name, "a string", value)
    return value


def _other(where: str, name: str, expected: str, value: Any) -> RoutesError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RoutesError(f"{where}: expected {name} to be {expected}, got {shown}")
