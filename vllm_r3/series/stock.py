"""The unpatched side of an installed vLLM, and the metadata of the patched one.

`Stock` shows the files as they were before an application in place, whether or not one is there.
Works in memory; writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_r3.errors import R3Error
from vllm_r3.series import record as records
from vllm_r3.series.site import Site, parse_record, record_row, render_record
from vllm_r3.series.versions import VERSION_FILE, set_field, set_version

Files = dict[str, "bytes | None"]


@dataclass(frozen=True)
class Stock:
    """`undo` (path -> content, None for no file) laid over what is on the disk."""

    site: Site
    undo: Mapping[str, bytes | None]

    def read(self, path: str) -> bytes | None:
        """Return a file's stock content, None if stock has no such file."""
        return self.undo[path] if path in self.undo else self.site.read(path)

    @property
    def info(self) -> str:
        """The name of the stock dist-info folder."""
        names = [p for p, data in self.undo.items() if p.endswith("/METADATA") and data is not None]
        return names[0].split("/")[0] if names else self.site.info

    @property
    def version(self) -> str:
        """The stock version, as METADATA has it."""
        match = re.search(rb"(?m)^Version: (.+)$", self.need(f"{self.info}/METADATA"))
        if match is None:
            raise R3Error(f"{self.site.root / self.info}/METADATA: expected a Version, found none")
        return match.group(1).decode().strip()

    def need(self, path: str) -> bytes:
        """Return a stock file that every installation has."""
        data = self.read(path)
        if data is None:
            raise R3Error(
                f"{self.site.root / path}: expected this file, found none; reinstall vLLM"
            )
        return data

    def info_files(self) -> list[str]:
        """Return the paths of the stock dist-info, sorted."""
        info = self.info
        if info in {path.split("/")[0] for path in self.undo}:
            return sorted(
                p for p, d in self.undo.items() if p.startswith(f"{info}/") and d is not None
            )
        folder = self.site.root / info
        return sorted(
            p.relative_to(self.site.root).as_posix() for p in folder.rglob("*") if p.is_file()
        )


def with_metadata(stock: Stock, version: str, patched: Files) -> tuple[Files, Files]:
    """Add the version's files to `patched` (path -> content after the series).

    Returns:
        All touched files before and after, the moved dist-info among them.
    """
    old, new = stock.info, f"{stock.info.split('-')[0]}-{version}.dist-info"
    after = {**patched, VERSION_FILE: set_version(stock.need(VERSION_FILE), version)}
    moved: Files = {path: stock.need(path) for path in stock.info_files()}
    moved[f"{old}/METADATA"] = set_field(stock.need(f"{old}/METADATA"), "Version", version)
    names = {path: new + path[len(old) :] for path in moved}
    rows = parse_record(stock.need(f"{old}/RECORD"))
    for path, data in {**after, **moved}.items():
        _set_row(rows, path, data)
    rows = {names.get(path, path): row for path, row in rows.items()}
    rows[f"{new}/{records.NAME}"] = ("", "")
    moved[f"{old}/RECORD"] = render_record(rows)
    after |= {path: None for path in moved}
    after |= {names[path]: data for path, data in moved.items()}
    return {path: stock.read(path) for path in after}, after


def _set_row(rows: dict[str, tuple[str, str]], path: str, data: bytes | None) -> None:
    if path.endswith(".dist-info/RECORD"):
        return
    if data is None:
        rows.pop(path, None)
    else:
        rows[path] = record_row(data)
