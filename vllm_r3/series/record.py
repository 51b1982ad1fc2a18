"""`vllm_r3.json` in vLLM's dist-info: what was applied, and what to put back.

Holds the pin, the series' hash and patches, the version, sha256 before and after of each touched
file, and (for an installation patched in place) the original content, so that a revert needs
neither the wheel nor the series that was applied.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import Series
from vllm_r3.series.hashes import sha256

NAME = "vllm_r3.json"
FORMAT = 1


@dataclass(frozen=True)
class Record:
    """The content of vllm_r3.json; `origin` is `in place` or `wheel`."""

    format: int
    origin: str
    base: str
    commit: str
    version: str
    series: str
    patches: list[str]
    before: dict[str, str]
    after: dict[str, str]
    originals: dict[str, str | None]

    def original(self, path: str) -> bytes | None:
        """Return the content that a file had before, None if there was none."""
        packed = self.originals[path]
        return None if packed is None else zlib.decompress(base64.b64decode(packed))


def make_record(
    series: Series,
    origin: str,
    version: str,
    before: Mapping[str, bytes | None],
    after: Mapping[str, bytes | None],
) -> Record:
    """Make the record of one application; `before` and `after` hold every touched file."""
    keep = origin == "in place"
    return Record(
        format=FORMAT,
        origin=origin,
        base=series.pin.vllm,
        commit=series.pin.commit,
        version=version,
        series=series.hash,
        patches=series.order,
        before={path: sha256(before[path]) for path in sorted(before)},
        after={path: sha256(after[path]) for path in sorted(after)},
        originals={path: _pack(before[path]) for path in sorted(before)} if keep else {},
    )


def render(record: Record) -> bytes:
    """Return the bytes of vllm_r3.json."""
    return (json.dumps(asdict(record), indent=1) + "\n").encode()


def parse(data: bytes, where: str) -> Record:
    """Read the bytes of vllm_r3.json.

    Raises:
        R3Error: they are not a record of this format.
    """
    try:
        record = Record(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise R3Error(f"{where}: not a record of vllm-r3 ({error}); reinstall vLLM") from error
    if record.format != FORMAT:
        raise R3Error(
            f"{where}: expected format {FORMAT}, found {record.format}; "
            "use the vllm-r3 that wrote it"
        )
    return record


def _pack(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(zlib.compress(data, 9)).decode()
