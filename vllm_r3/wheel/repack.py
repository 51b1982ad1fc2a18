"""From the pinned wheel to the patched one.

Reads the wheel once with every member checked against its RECORD, applies the series strictly in
memory, sets name and version, writes RECORD anew.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series import record as records
from vllm_r3.series.folder import Series, apply_patch, touched
from vllm_r3.series.site import parse_record, record_row, render_record
from vllm_r3.series.source import file_sha256
from vllm_r3.series.versions import VERSION_FILE, set_version
from vllm_r3.wheel.archive import check_members, info_folder, rewrite
from vllm_r3.wheel.metadata import patched_metadata, patched_name, patched_wheel

Files = dict[str, "bytes | None"]


@dataclass(frozen=True)
class Repacked:
    """The wheel that was written."""

    path: Path
    version: str
    size: int
    sha256: str
    series: str


def repack(series: Series, target: str, wheel: Path, dest: Path) -> Repacked:
    """Write the patched wheel of a target ("cpu" or "cuda") into the folder `dest`.

    Raises:
        R3Error: the wheel does not fit its RECORD, a patch does not apply, or the disk is full.
    """
    version = series.pin.patched_version(target)
    new_info = f"vllm-{version}.dist-info"
    try:
        with zipfile.ZipFile(wheel) as archive:
            check_members(archive, wheel)
            old_info = info_folder(archive, wheel)
            changed = _changed(series, archive, old_info, new_info, version, wheel)
    except zipfile.BadZipFile as error:
        raise R3Error(f"{wheel}: expected a wheel, could not read it: {error}") from error
    dest.mkdir(parents=True, exist_ok=True)
    path = dest / patched_name(wheel.name, version)
    rewrite(wheel, path, _renamer(old_info, new_info), changed, f"{new_info}/RECORD")
    return Repacked(path, version, path.stat().st_size, file_sha256(path), series.hash)


def _renamer(old_info: str, new_info: str):
    def rename(name: str) -> str:
        return new_info + name[len(old_info) :] if name.startswith(f"{old_info}/") else name

    return rename


def _changed(
    series: Series,
    archive: zipfile.ZipFile,
    old_info: str,
    new_info: str,
    version: str,
    wheel: Path,
) -> Files:
    before, after = _patched(series, archive, version)
    files: Files = {
        **after,
        f"{new_info}/METADATA": patched_metadata(archive.read(f"{old_info}/METADATA"), version),
        f"{new_info}/WHEEL": patched_wheel(archive.read(f"{old_info}/WHEEL"), wheel.name),
        f"{new_info}/{records.NAME}": records.render(
            records.make_record(series, "wheel", version, before, after)
        ),
    }
    rename = _renamer(old_info, new_info)
    rows = parse_record(archive.read(f"{old_info}/RECORD"))
    rows = {rename(path): row for path, row in rows.items()}
    rows.update({path: record_row(data) for path, data in files.items() if data is not None})
    for path in [path for path, data in files.items() if data is None]:
        rows.pop(path, None)
    own = f"{new_info}/RECORD"
    rows = {path: rows[path] for path in sorted(rows) if path != own} | {own: ("", "")}
    return {**files, own: render_record(rows)}


def _patched(series: Series, archive: zipfile.ZipFile, version: str) -> tuple[Files, Files]:
    patches = series.patches()
    names = set(archive.namelist())
    paths = {*touched(patches), VERSION_FILE}
    before: Files = {p: archive.read(p) if p in names else None for p in sorted(paths)}
    after = dict(before)
    for number, patch in enumerate(patches, 1):
        try:
            apply_patch(patch, after)
        except R3Error as error:
            raise R3Error(f"patch {number} of {len(patches)}: {error}") from error
    after[VERSION_FILE] = set_version(after[VERSION_FILE] or b"", version)
    return before, after
