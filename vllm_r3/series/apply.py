"""Patch an installed vLLM in place, and take the patches out again.

Everything is worked out in memory and checked by hash before the first file changes. Besides the
patched files an application sets the version: `vllm/_version.py`, METADATA, the name of the
dist-info folder, and RECORD, so that pip and `vllm --version` tell the truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series import record as records
from vllm_r3.series.folder import Series, apply_patch, touched
from vllm_r3.series.hashes import sha256
from vllm_r3.series.record import Record
from vllm_r3.series.site import Site, read_site
from vllm_r3.series.stock import Files, Stock, with_metadata
from vllm_r3.series.transaction import locked, recover, replace_all
from vllm_r3.series.versions import patched_version


@dataclass(frozen=True)
class Outcome:
    """What a run did: the version now installed, how many files changed (0: it was so already)."""

    version: str
    num_files: int
    recovered: bool


def apply_series(series: Series, root: Path) -> Outcome:
    """Apply a series to the vLLM in a site-packages folder.

    An older series that was applied in place is taken out in the same step. Applying what is there
    already changes nothing.

    Raises:
        R3Error: it is another vLLM, a file was modified, or a patch does not fit; nothing changed.
    """
    with locked(root):
        recovered = recover(root)
        site = read_site(root)
        found = read_record(site)
        if found and _is_same(series, site, found):
            _assert_unmodified(site, found, "apply")
            return Outcome(found.version, 0, recovered)
        stock = Stock(site, _undo(site, found, "apply") if found else {})
        version = patched_version(series.pin, stock.version, site.target)
        changes = {**stock.undo, **_patched(series, stock, version)}
        replace_all(root, changes)
        return Outcome(read_site(root).version, len(changes), recovered)


def revert_series(root: Path) -> Outcome:
    """Give a vLLM that was patched in place the bytes that it had before.

    Raises:
        R3Error: it was installed as a patched wheel, or a file was modified since.
    """
    with locked(root):
        recovered = recover(root)
        site = read_site(root)
        found = read_record(site)
        changes = _undo(site, found, "revert") if found else {}
        if changes:
            replace_all(root, changes)
        return Outcome(read_site(root).version, len(changes), recovered)


def read_record(site: Site) -> Record | None:
    """Return the record of the installed vLLM, None if no series is applied."""
    path = f"{site.info}/{records.NAME}"
    data = site.read(path)
    return None if data is None else records.parse(data, str(site.root / path))


def modified(site: Site, found: Record) -> list[str]:
    """Return the recorded files whose content is not what the series left."""
    return [path for path, want in found.after.items() if sha256(site.read(path)) != want]


def _is_same(series: Series, site: Site, found: Record) -> bool:
    revision = series.pin.patched_version(site.target).removesuffix(".cpu")
    return found.series == series.hash and f"{found.version}.".startswith(f"{revision}.")


def _assert_unmodified(site: Site, found: Record, verb: str) -> None:
    bad = modified(site, found)
    if bad:
        raise R3Error(
            f"{site.root}: cannot {verb}: expected the files that series {found.series[:12]} left, "
            f"found others: {', '.join(bad)}; nothing was changed; reinstall vLLM"
        )


def _undo(site: Site, found: Record, verb: str) -> Files:
    if found.origin == "wheel":
        raise R3Error(
            f"{site.root}: cannot {verb}: vLLM {found.version} was installed as a patched wheel; "
            "install the wheel that you want instead"
        )
    _assert_unmodified(site, found, verb)
    files: Files = {path: found.original(path) for path in found.originals}
    return {**files, f"{site.info}/{records.NAME}": None}


def _patched(series: Series, stock: Stock, version: str) -> Files:
    """Return every file that an application changes, the record among them."""
    patches = series.patches()
    after: Files = {path: stock.read(path) for path in touched(patches)}
    for number, patch in enumerate(patches, 1):
        try:
            apply_patch(patch, after)
        except R3Error as error:
            raise R3Error(
                f"{stock.site.root}: nothing was changed: patch {number} of {len(patches)}: "
                f"{error}; expected the files of vLLM {series.pin.vllm}, reinstall it"
            ) from error
    before, after = with_metadata(stock, version, after)
    made = records.make_record(series, "in place", version, before, after)
    info = next(path for path in after if path.endswith("/METADATA") and after[path])
    return {**after, f"{info.split('/')[0]}/{records.NAME}": records.render(made)}
