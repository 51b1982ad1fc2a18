"""Say what an installed vLLM is: stock, patched with a series, or modified.

Compares every Python file that the installation lists with its own RECORD, and the files of the
series with what the patches say. Writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_r3.series.apply import read_record
from vllm_r3.series.folder import Series
from vllm_r3.series.hashes import sha256
from vllm_r3.series.patchfile import blob_id
from vllm_r3.series.site import Site, parse_record, read_site, record_row
from vllm_r3.series.transaction import interrupted


@dataclass(frozen=True)
class Status:
    """`state` is `stock`, `patched`, `modified` or `interrupted`; `files` are the modified ones."""

    state: str
    version: str
    series: str = ""
    num_patches: int = 0
    current: bool = False
    files: tuple[str, ...] = ()


def read_status(series: Series, root: Path) -> Status:
    """Inspect the vLLM in a site-packages folder.

    Raises:
        R3Error: there is no vLLM.
    """
    if interrupted(root):
        return Status("interrupted", "")
    site = read_site(root)
    found = read_record(site)
    bad = set(_unlike_record(site))
    if found is None:
        bad |= (
            set(_unlike_stock(series, site))
            if site.version.startswith(series.pin.version)
            else set()
        )
        return Status("modified" if bad else "stock", site.version, files=tuple(sorted(bad)))
    bad |= {path for path, want in found.after.items() if sha256(site.read(path)) != want}
    return Status(
        "modified" if bad else "patched",
        found.version,
        found.series,
        len(found.patches),
        found.series == series.hash,
        tuple(sorted(bad)),
    )


def _unlike_record(site: Site) -> list[str]:
    rows = parse_record(site.read(f"{site.info}/RECORD") or b"")
    out = []
    for path, row in rows.items():
        if path.startswith("vllm/") and path.endswith(".py") and row[0]:
            data = site.read(path)
            if data is None or record_row(data) != row:
                out.append(path)
    return out


def _unlike_stock(series: Series, site: Site) -> list[str]:
    """Return the files whose content is not what the first patch that touches them expects."""
    first: dict[str, str | None] = {}
    for patch in series.patches():
        for change in patch.changes:
            first.setdefault(change.path, change.old_blob)
    blobs = {path: None if (d := site.read(path)) is None else blob_id(d) for path in first}
    return [path for path, want in first.items() if blobs[path] != want]
