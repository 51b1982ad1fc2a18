"""What a patched build says about itself: `vllm/_version.py` and the files of its dist-info.

One function makes them for the wheel and for an installation that is patched in place:

    METADATA        the version; of the wheel the name `vllm` too, and no torch of another index
    WHEEL           of the wheel: the tags that its file name has
    vllm_r3.json    what was applied: pin, series, and both blob ids of each changed file
    RECORD          every file by hash and size
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import Pin, Series
from vllm_r3.series.patch import apply_patch, blob_id, blobs

NAME = "vllm_r3.json"
KEPT = "vllm_r3/original"
FORMAT = 2
VERSION_FILE = "vllm/_version.py"
Row = tuple[str, str]


class Applied(NamedTuple):
    """The content of vllm_r3.json.

    `origin` is `in place` or `wheel`, `stock_info` the name that the dist-info had; `files` has the
    blob ids of each changed file below vllm/, before and after (None: no file).
    """

    format: int
    origin: str
    base: str
    version: str
    series: str
    patches: list[str]
    stock_info: str
    files: dict[str, list[str | None]]

    def is_of(self, series: Series) -> bool:
        """Return whether this is what `series` makes, in its revision."""
        mine = f"{series.pin.patched_version('cuda')}."
        return self.series == series.hash and f"{self.version}.".startswith(mine)


class Build(NamedTuple):
    """A patched vLLM.

    `files` are the changed ones below vllm/ (None: removed), `info` is the name of its dist-info,
    `info_files` are that folder's, `kept` copies of what was there, if it is patched in place.
    """

    applied: Applied
    info: str
    files: Mapping[str, bytes | None]
    info_files: dict[str, bytes]
    kept: dict[str, bytes]

    def in_order(self) -> Iterator[tuple[str, bytes | None]]:
        """Yield what is put in place: vllm_r3.json, the files below vllm/, the rest, METADATA."""
        files = {**self.files, **self.info_files}
        rank = {f"{self.info}/{NAME}": 0, f"{self.info}/METADATA": 2}
        return iter(sorted(files.items(), key=lambda item: rank.get(item[0], 1)))


def patched_build(
    series: Series,
    version: str,
    read: Callable[[str], bytes | None],
    stock_info: Mapping[str, bytes],
    wheel_file: str = "",
) -> Build:
    """Apply a series to a stock vLLM, strictly, and describe the result.

    Args:
        read: the content of a stock file, None if there is none.
        stock_info: the files of the stock dist-info, by path.
        wheel_file: the name of the pinned wheel if a wheel is made.
    """
    patches = series.patches()
    before = {path: read(path) for path in sorted({*blobs(patches), VERSION_FILE})}
    after = dict(before)
    for number, patch in enumerate(patches, 1):
        try:
            apply_patch(patch, after)
        except R3Error as error:
            raise R3Error(f"patch {number} of {len(patches)}: {error}") from error
    after[VERSION_FILE] = set_version(after[VERSION_FILE] or b"", version)
    old = next(iter(stock_info)).split("/")[0]
    new = f"{'vllm' if wheel_file else old.split('-')[0]}-{version}.dist-info"
    applied = Applied(
        format=FORMAT,
        origin="wheel" if wheel_file else "in place",
        base=str(series.pin),
        version=version,
        series=series.hash,
        patches=series.order,
        stock_info=old,
        files={path: [blob_id(before[path]), blob_id(after[path])] for path in before},
    )
    made = {new + path[len(old) :]: data for path, data in stock_info.items()}
    made[f"{new}/METADATA"] = _set(made[f"{new}/METADATA"], rb"^(Version: ).*$", version)
    if wheel_file:
        metadata = _set(made[f"{new}/METADATA"], rb"^(Name: ).*$", "vllm")
        made[f"{new}/METADATA"] = without_local_torch(metadata)
        made[f"{new}/WHEEL"] = patched_tags(made[f"{new}/WHEEL"], wheel_file)
    made[f"{new}/{NAME}"] = (json.dumps(applied._asdict(), indent=1) + "\n").encode()
    keep = {} if wheel_file else {**before, **stock_info}
    kept = {f"{new}/{KEPT}/{path}": data for path, data in keep.items() if data is not None}
    rows = parse_record(made.pop(f"{new}/RECORD"))
    gone = {path for path, data in after.items() if data is None}
    rows = {p: r for p, r in rows.items() if p not in gone and not p.startswith(f"{old}/")}
    files = {**after, **made, **kept}
    rows |= {path: record_row(data) for path, data in files.items() if data is not None}
    rows[f"{new}/RECORD"] = ("", "")
    made[f"{new}/RECORD"] = render_record(dict(sorted(rows.items())))
    return Build(applied, new, after, made, kept)


def read_applied(path: Path) -> Applied:
    """Read a vllm_r3.json."""
    try:
        raw = json.loads(path.read_bytes())
        found = raw["format"]
        if found == FORMAT:
            return Applied(**raw)
    except (ValueError, TypeError, KeyError) as error:
        raise R3Error(f"{path}: not a record of vllm-r3 ({error!r}); reinstall vLLM") from error
    raise R3Error(f"{path}: expected format {FORMAT}, found {found}; use the vllm-r3 that wrote it")


def patched_version(pin: Pin, found: str, target: str) -> str:
    """Return the version of a patched build of an installed version.

    A local part that the base has stays, behind ours: 0.21.0+cu129 -> 0.21.0+r3.1.cu129.
    """
    public, _, local = found.partition("+")
    if public != pin.version:
        raise R3Error(f"expected vLLM {pin.version}, found {found}; this series fits no other one")
    version = pin.patched_version(target)
    return f"{version}.{local}" if local and local != "cpu" else version


def version_of(info: Mapping[str, bytes]) -> str:
    """Return the version that the files of a dist-info have."""
    path, data = next(item for item in info.items() if item[0].endswith("/METADATA"))
    match = re.search(rb"^Version: (.+)$", data.split(b"\n\n", 1)[0], re.MULTILINE)
    if match is None:
        raise R3Error(f"{path}: expected a Version, found none; reinstall vLLM")
    return match[1].decode().strip()


def set_version(source: bytes, version: str) -> bytes:
    """Return `vllm/_version.py` with another version, its tuple ending in the local part."""
    public, _, local = version.partition("+")
    parts = ", ".join([*public.split("."), repr(local)])
    source = _set(source, rb"^(__version__ = version = ).*$", repr(version))
    return _set(source, rb"^(__version_tuple__ = version_tuple = ).*$", f"({parts})")


def patched_tags(wheel: bytes, file: str) -> bytes:
    """Return WHEEL with the tags that the file name has, and our name as the generator."""
    parts = (part.split(".") for part in file.removesuffix(".whl").split("-")[-3:])
    tags = "".join(f"Tag: {'-'.join(tag)}\n" for tag in itertools.product(*parts))
    head = re.sub(rb"(?m)^(Tag|Build): .*\n", b"", wheel).rstrip(b"\n")
    return _set(head, rb"^(Generator: ).*$", "vllm-r3") + b"\n" + tags.encode()


def without_local_torch(metadata: bytes) -> bytes:
    """Return METADATA without the `+cpu` of torch, which the index of the wheel does not have."""
    return re.sub(rb"(?m)^(Requires-Dist: torch==[0-9.]+)\+cpu\b", rb"\1", metadata)


def parse_record(data: bytes) -> dict[str, Row]:
    """Return a RECORD as path -> (hash, size), both as they stand there."""
    rows = csv.reader(io.StringIO(data.decode("utf-8")))
    return {row[0]: (row[1], row[2]) for row in rows if row}


def render_record(rows: Mapping[str, Row]) -> bytes:
    """Return the bytes of a RECORD, in the order of `rows`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows((path, *rest) for path, rest in rows.items())
    return out.getvalue().encode()


def record_row(data: bytes) -> Row:
    """Return the hash and the size of a file as RECORD spells them."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(data))


def _set(data: bytes, line: bytes, value: str) -> bytes:
    out, count = re.subn(line, lambda m: m[1] + value.encode(), data, count=1, flags=re.MULTILINE)
    if not count:
        raise R3Error(f"expected a line like {line.decode()} in vLLM's version files, found none")
    return out
