"""The metadata of a patched wheel: METADATA, WHEEL and the file name.

Pure functions on bytes and names.
"""

from __future__ import annotations

import re

from vllm_r3.series.versions import set_field


def patched_name(file: str, version: str) -> str:
    """Return the file name of the patched wheel: `vllm-VERSION-TAGS.whl`, no build number."""
    return "-".join(["vllm", version, *file.split("-")[-3:]])


def patched_metadata(metadata: bytes, version: str) -> bytes:
    """Return METADATA as distribution `vllm` in another version.

    The CPU wheel asks for torch==2.11.0+cpu, which the index that it lies on does not have.
    """
    metadata = set_field(metadata, "Name", "vllm")
    metadata = set_field(metadata, "Version", version)
    return re.sub(rb"(?m)^(Requires-Dist: torch==[0-9.]+)\+cpu\b", rb"\1", metadata)


def patched_wheel(wheel: bytes, file: str) -> bytes:
    """Return WHEEL with the tags that the file name has, and our name as the generator."""
    pythons, abis, platforms = file.removesuffix(".whl").split("-")[-3:]
    tags = [
        f"Tag: {python}-{abi}-{platform}\n"
        for python in pythons.split(".")
        for abi in abis.split(".")
        for platform in platforms.split(".")
    ]
    head = re.sub(rb"(?m)^(Tag|Build): .*\n", b"", wheel).rstrip(b"\n")
    return set_field(head, "Generator", "vllm-r3") + b"\n" + "".join(tags).encode()
