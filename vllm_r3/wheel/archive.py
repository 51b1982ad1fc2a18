"""Read a wheel with every member checked, write one that is the same bytes everywhere.

Unchanged members are copied compressed, as they lie; changed ones are stored. So no member goes
through a compressor, whose output differs between zlib builds. Knows nothing of vLLM.
"""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from vllm_r3.errors import R3Error
from vllm_r3.series.site import parse_record, record_row

CHUNK = 1 << 20
EARLIEST = 315532800  # 1980-01-01, the first moment that a zip file can name
Rename = Callable[[str], str]


def info_folder(archive: zipfile.ZipFile, where: Path) -> str:
    """Return the name of a wheel's one dist-info folder."""
    names = {n.split("/")[0] for n in archive.namelist() if n.split("/")[0].endswith(".dist-info")}
    if len(names) != 1:
        raise R3Error(f"{where}: expected one .dist-info folder, found {sorted(names) or 'none'}")
    return names.pop()


def check_members(archive: zipfile.ZipFile, where: Path) -> None:
    """Compare every member with the wheel's own RECORD.

    Raises:
        R3Error: with every member that differs, is not listed or is not there.
    """
    record = f"{info_folder(archive, where)}/RECORD"
    rows = parse_record(archive.read(record))
    names = {name for name in archive.namelist() if not name.endswith("/")}
    bad = [f"{name} is not listed" for name in sorted(names - set(rows))]
    bad += [f"{name} is not there" for name in sorted(set(rows) - names)]
    for name in sorted(names & set(rows) - {record}):
        if record_row(archive.read(name)) != rows[name]:
            bad.append(f"{name} differs")
    if bad:
        raise R3Error(f"{where} does not fit its RECORD: {'; '.join(bad)}; download it again")


def rewrite(
    source: Path, dest: Path, rename: Rename, changed: Mapping[str, bytes | None], last: str
) -> None:
    """Write `dest` from `source`, beside it first and renamed when whole.

    Args:
        rename: new name of a member.
        changed: content by new name (None: leave it out); the rest is copied.
        last: the member that goes last, by new name.
    """
    temp = dest.with_name(f".{dest.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(temp, "w") as new:
            infos = {rename(i.filename): i for i in old.infolist() if not i.is_dir()}
            names = [n for n in {**infos, **changed} if changed.get(n, b"") is not None]
            for name in sorted(names, key=lambda n: (n == last, ".dist-info/" in n, n)):
                _add(old, new, name, infos.get(name), changed.get(name))
        os.replace(temp, dest)
    except OSError as error:
        raise R3Error(f"{dest}: could not write the wheel: {error}") from error
    finally:
        temp.unlink(missing_ok=True)


def _add(
    old: zipfile.ZipFile,
    new: zipfile.ZipFile,
    name: str,
    member: zipfile.ZipInfo | None,
    data: bytes | None,
) -> None:
    info = zipfile.ZipInfo(name, _timestamp())
    info.create_system = 3
    info.external_attr = member.external_attr if member else 0o100644 << 16
    if data is not None:
        new.writestr(info, data, zipfile.ZIP_STORED)
    elif member is not None:
        _copy_raw(old, new, member, info)


def _copy_raw(
    old: zipfile.ZipFile, new: zipfile.ZipFile, member: zipfile.ZipInfo, info: zipfile.ZipInfo
) -> None:
    """Copy the compressed bytes of one member under the header `info`."""
    info.compress_type = member.compress_type
    info.CRC = member.CRC
    info.compress_size = member.compress_size
    info.file_size = member.file_size
    reader, writer = _files(old, new)
    reader.seek(member.header_offset)
    header = reader.read(30)
    skip = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    reader.seek(member.header_offset + 30 + skip)
    writer.seek(new.start_dir)
    info.header_offset = writer.tell()
    writer.write(info.FileHeader())
    left = member.compress_size
    while left:
        chunk = reader.read(min(CHUNK, left))
        if not chunk:
            raise R3Error(f"{old.filename}: expected {left} more bytes of {member.filename}")
        writer.write(chunk)
        left -= len(chunk)
    new.start_dir = writer.tell()
    new.filelist.append(info)
    new.NameToInfo[info.filename] = info


def _files(old: zipfile.ZipFile, new: zipfile.ZipFile) -> tuple[BinaryIO, BinaryIO]:
    return old.fp, new.fp  # type: ignore[return-value]


def _timestamp() -> tuple[int, int, int, int, int, int]:
    text = os.environ.get("SOURCE_DATE_EPOCH", str(EARLIEST))
    if not text.isdigit():
        raise R3Error(f"SOURCE_DATE_EPOCH: expected seconds since 1970, found {text!r}")
    moment = time.gmtime(max(int(text), EARLIEST))
    return moment[:6]  # type: ignore[return-value]
