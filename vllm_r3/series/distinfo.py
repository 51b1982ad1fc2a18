"""What a patched build says about itself: `vllm/_version.py` and the files of its dist-info.

One function makes them for the wheel and for an installation that is patched in place. Works on
bytes; touches no disk.

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
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import Pin, Series
from vllm_r3.series.patch import apply_patch, blob_id, blobs

NAME = "vllm_r3.json"
KEPT = "vllm_r3/original"
FORMAT = 2
VERSION_FILE = "vllm/_version.py"
Files = dict[str, "bytes | None"]


@dataclass(frozen=True)
class Applied:
    """The content of vllm_r3.json; `origin` is `in place` or `wheel`.

    `files` has the blob ids of each changed file below vllm/, before and after (None: no file);
    `stock_info` is the name that the dist-info folder had.
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


@dataclass(frozen=True)
class Build:
    """A patched vLLM.

    `files` are the changed ones below vllm/, `info` is the name of its dist-info, `info_files` are
    that folder's; `kept` are copies of what was there, for an installation patched in place.
    """

    applied: Applied
    info: str
    files: Files
    info_files: dict[str, bytes]
    kept: dict[str, bytes]


def patched_build(
    series: Series,
    version: str,
    read: Callable[[str], bytes | None],
    stock_info: Mapping[str, bytes],
    wheel_file: str = "",
) -> Build:
    """Apply a series to a stock vLLM and describe the result.

    Args:
        read: the content of a stock file, None if there is none.
        stock_info: the files of the stock dist-info, by path.
        wheel_file: the name of the pinned wheel if a wheel is made.

    Raises:
        R3Error: a patch does not apply.
    """
    patches = series.patches()
    before: Files = {path: read(path) for path in sorted({*blobs(patches), VERSION_FILE})}
    after = dict(before)
    for number, patch in enumerate(patches, 1):
        try:
            apply_patch(patch, after)
        except R3Error as error:
            raise R3Error(f"patch {number} of {len(patches)}: {error}") from error
    after[VERSION_FILE] = set_version(after[VERSION_FILE] or b"", version)
    old = next(iter(stock_info)).split("/")[0]
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
    new = f"{'vllm' if wheel_file else old.split('-')[0]}-{version}.dist-info"
    made = {new + path[len(old) :]: data for path, data in stock_info.items()}
    made[f"{new}/METADATA"] = _metadata(made[f"{new}/METADATA"], version, bool(wheel_file))
    if wheel_file:
        made[f"{new}/WHEEL"] = patched_tags(made[f"{new}/WHEEL"], wheel_file)
    made[f"{new}/{NAME}"] = (json.dumps(asdict(applied), indent=1) + "\n").encode()
    own = f"{new}/RECORD"
    rows = {p: r for p, r in parse_record(made.pop(own)).items() if not p.startswith(f"{old}/")}
    kept = (
        {} if wheel_file else {f"{new}/{KEPT}/{p}": d for p, d in {**before, **stock_info}.items()}
    )
    for path, data in {**after, **made, **kept}.items():
        rows.pop(path, None)
        if data is not None:
            rows[path] = record_row(data)
    made[own] = render_record({path: rows[path] for path in sorted(rows)} | {own: ("", "")})
    return Build(applied, new, after, made, {p: d for p, d in kept.items() if d is not None})


def parse_applied(data: bytes, where: str) -> Applied:
    """Read the bytes of vllm_r3.json.

    Raises:
        R3Error: they are not a record of this format.
    """
    try:
        raw = json.loads(data)
        if raw["format"] != FORMAT:
            raise R3Error(
                f"{where}: expected format {FORMAT}, found {raw['format']}; "
                "use the vllm-r3 that wrote it"
            )
        return Applied(**raw)
    except (ValueError, TypeError, KeyError) as error:
        raise R3Error(f"{where}: not a record of vllm-r3 ({error!r}); reinstall vLLM") from error


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


def patched_tags(wheel: bytes, file: str) -> bytes:
    """Return WHEEL with the tags that the file name has, and our name as the generator."""
    pythons, abis, platforms = file.removesuffix(".whl").split("-")[-3:]
    tags = [
        f"Tag: {python}-{abi}-{platform}\n"
        for python in pythons.split(".")
        for abi in abis.split(".")
        for platform in platforms.split(".")
    ]
    head = re.sub(rb"(?m)^(Tag|Build): .*\n", b"", wheel).rstrip(b"\n")
    return _sub(rb"(?m)^(Generator: ).*$", "vllm-r3", head) + b"\n" + "".join(tags).encode()


def parse_record(data: bytes) -> dict[str, tuple[str, str]]:
    """Return a RECORD as path -> (hash, size), both as they stand there."""
    rows = csv.reader(io.StringIO(data.decode("utf-8")))
    return {row[0]: (row[1], row[2]) for row in rows if row}


def render_record(rows: Mapping[str, tuple[str, str]]) -> bytes:
    """Return the bytes of a RECORD, in the order of `rows`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows((path, *rest) for path, rest in rows.items())
    return out.getvalue().encode()


def record_row(data: bytes) -> tuple[str, str]:
    """Return the hash and the size of a file as RECORD spells them."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(data))


def _metadata(data: bytes, version: str, for_wheel: bool) -> bytes:
    data = _sub(rb"(?m)^(Version: ).*$", version, data)
    if for_wheel:
        data = without_local_torch(_sub(rb"(?m)^(Name: ).*$", "vllm", data))
    return data


def without_local_torch(metadata: bytes) -> bytes:
    """Return METADATA without the `+cpu` of torch, which the index of the wheel does not have."""
    return re.sub(rb"(?m)^(Requires-Dist: torch==[0-9.]+)\+cpu\b", rb"\1", metadata)


def _sub(pattern: bytes, value: str, data: bytes) -> bytes:
    out, count = re.subn(pattern, lambda m: m.group(1) + value.encode(), data, count=1)
    if not count:
        raise R3Error(
            f"expected a line like {pattern.decode()} in vLLM's version files, found none"
        )
    return out
