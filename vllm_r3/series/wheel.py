"""From the pinned wheel to the patched one.

Compares every member with the wheel's RECORD, applies the series strictly in memory, sets name and
version, writes RECORD anew. Members are stored, not compressed: the same
bytes on every host, whatever its zlib.
"""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Set
from email.parser import BytesHeaderParser
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series.distinfo import (
    Build,
    parse_record,
    patched_build,
    record_row,
    without_local_torch,
)
from vllm_r3.series.folder import Series

EARLIEST = 315532800  # 1980-01-01, the first moment that a zip file can name
# intel-openmp's wheels disagree about this one, so a lock for every platform would leave it out
UNSAID = {"cpu": ["intel-cmplr-lib-ur==2024.2.1; platform_machine == 'x86_64'"], "cuda": []}


def repack(series: Series, target: str, wheel: Path, dest: Path) -> Path:
    """Write the patched wheel of a target ("cpu" or "cuda") into `dest`; return its path."""
    version = series.pin.patched_version(target)
    path = dest / "-".join(["vllm", version, *wheel.name.split("-")[-3:]])
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(wheel) as old:
            info = _info_folder(old, wheel)
            names = {name for name in old.namelist() if not name.endswith("/")}
            _check_members(old, names, wheel, info)
            stock = {name: old.read(name) for name in names if name.startswith(f"{info}/")}
            build = patched_build(
                series, version, lambda p: old.read(p) if p in names else None, stock, wheel.name
            )
            dest.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(temp, "w") as new:
                _write_members(old, new, names - stock.keys(), build)
        os.replace(temp, path)
    except zipfile.BadZipFile as error:
        raise R3Error(f"{wheel}: expected a wheel, could not read it: {error}") from error
    except OSError as error:
        raise R3Error(f"{path}: could not write the wheel: {error}") from error
    finally:
        temp.unlink(missing_ok=True)
    return path


def requirements(wheel: Path, target: str) -> list[str]:
    """Return the requirements of the patched wheel without its extras, for `build.sh lock`."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{_info_folder(archive, wheel)}/METADATA")
    fields = BytesHeaderParser().parsebytes(without_local_torch(metadata))
    needs = [str(need) for need in fields.get_all("Requires-Dist", [])]
    return [need for need in needs if "extra ==" not in need] + UNSAID[target]


def _info_folder(archive: zipfile.ZipFile, where: Path) -> str:
    folders = {name.split("/")[0] for name in archive.namelist()}
    infos = sorted(name for name in folders if name.endswith(".dist-info"))
    if len(infos) != 1:
        raise R3Error(f"{where}: expected one .dist-info folder, found {infos or 'none'}")
    return infos[0]


def _check_members(archive: zipfile.ZipFile, names: Set[str], where: Path, info: str) -> None:
    """Compare every member with the wheel's own RECORD; tell all that is wrong."""
    own = f"{info}/RECORD"
    rows = parse_record(archive.read(own))
    bad = [f"{name} is not listed" for name in sorted(names - rows.keys())]
    bad += [f"{name} is not there" for name in sorted(rows.keys() - names)]
    common = sorted(names & rows.keys() - {own})
    bad += [f"{n} differs" for n in common if record_row(archive.read(n)) != rows[n]]
    if bad:
        raise R3Error(f"{where} does not fit its RECORD: {'; '.join(bad)}; download it again")


def _write_members(
    old: zipfile.ZipFile, new: zipfile.ZipFile, names: Set[str], build: Build
) -> None:
    """Write the members `names` and those of the build, RECORD last."""
    changed = {**build.files, **build.info_files}
    date = _timestamp()
    last = f"{build.info}/RECORD"
    for name in sorted(names | changed.keys(), key=lambda n: (n == last, ".dist-info/" in n, n)):
        data = changed[name] if name in changed else old.read(name)
        if data is not None:
            entry = zipfile.ZipInfo(name, date)
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            if name in names:
                entry.external_attr = old.getinfo(name).external_attr
            new.writestr(entry, data, zipfile.ZIP_STORED)


def _timestamp() -> tuple[int, int, int, int, int, int]:
    text = os.environ.get("SOURCE_DATE_EPOCH", str(EARLIEST))
    if not text.isdigit():
        raise R3Error(f"SOURCE_DATE_EPOCH: expected seconds since 1970, found {text!r}")
    moment = time.gmtime(max(int(text), EARLIEST))
    return moment[:6]  # type: ignore[return-value]
