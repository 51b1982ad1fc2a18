"""Write the version of a patched build into vLLM's generated files.

Pure functions on bytes, shared by the wheel and by an installation that is patched in place.
"""

from __future__ import annotations

import re

from vllm_r3.errors import R3Error
from vllm_r3.series.pin import Pin

VERSION_FILE = "vllm/_version.py"


def patched_version(pin: Pin, found: str, target: str) -> str:
    """Return the version of a patched build of an installed version.

    A local part that the base has stays, behind ours: 0.21.0+cu129 -> 0.21.0+r3.1.cu129.

    Raises:
        R3Error: the base is another version than the pin's.
    """
    public, _, local = found.partition("+")
    if public != pin.version:
        raise R3Error(f"expected vLLM {pin.version}, found {found}; this series fits no other one")
    version = pin.patched_version(target)
    return f"{version}.{local}" if local and local != "cpu" else version


def set_version(source: bytes, version: str) -> bytes:
    """Return `vllm/_version.py` with another version, its tuple ending in the local part."""
    public, _, local = version.partition("+")
    parts = ", ".join([*public.split("."), repr(local)])
    source = _sub(rb"(?m)^(__version__ = version = ).*$", repr(version), source)
    return _sub(rb"(?m)^(__version_tuple__ = version_tuple = ).*$", f"({parts})", source)


def set_field(metadata: bytes, field: str, value: str) -> bytes:
    """Return METADATA with the first `field` of its head set to `value`."""
    return _sub(rb"(?m)^(" + field.encode() + rb": ).*$", value, metadata)


def _sub(pattern: bytes, value: str, data: bytes) -> bytes:
    out, count = re.subn(pattern, lambda m: m.group(1) + value.encode(), data, count=1)
    if not count:
        raise R3Error(
            f"expected a line like {pattern.decode()} in vLLM's version files, found none"
        )
    return out
