"""Replace a set of files wholly or not at all, whatever kills the process.

    <root>/.vllm-r3-journal/new/<i>        the content to come
    <root>/.vllm-r3-journal/old/<i>        the content that was
    <root>/.vllm-r3-journal/journal.json   written last: from here on targets are replaced

All copies exist before the first target is touched, so a full disk changes nothing. A journal found
by a later run means that a run was cut off: `recover` puts the old content back. Targets are
replaced by rename, never written through: a hard link into a package cache stays what it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_r3.errors import R3Error

JOURNAL = ".vllm-r3-journal"
INDEX = "journal.json"


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the one lock of a folder; a second run is refused instead of mixed in."""
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise R3Error(f"{root}: another vllm-r3 works on it; run this one again later") from error
    finally:
        os.close(handle)


def replace_all(root: Path, files: Mapping[str, bytes | None]) -> None:
    """Give every path below `root` its new content (None: remove the file and empty folders).

    Raises:
        R3Error: the copies could not be written; no target was touched.
    """
    if interrupted(root):
        raise R3Error(f"{root / JOURNAL}: expected no journal here, found one; recover first")
    journal = root / JOURNAL
    paths = list(files)
    try:
        _stage(root, journal, files)
    except OSError as error:
        shutil.rmtree(journal, ignore_errors=True)
        raise R3Error(f"{root}: nothing was changed, could not prepare: {error}") from error
    try:
        for number, path in enumerate(paths):
            _place(journal / "new" / str(number), root / path)
    except BaseException:
        recover(root)
        raise
    _prune(root, [path for path in paths if files[path] is None])
    _drop(journal)


def interrupted(root: Path) -> bool:
    """Tell whether a run was cut off while it replaced files."""
    return (root / JOURNAL / INDEX).exists()


def recover(root: Path) -> bool:
    """Undo a run that was cut off; return whether there was one that had begun to replace files."""
    journal = root / JOURNAL
    begun = interrupted(root)
    if begun:
        paths = json.loads((journal / INDEX).read_text(encoding="utf-8"))
        for number, path in enumerate(paths):
            _restore(journal / "old" / str(number), root / path)
        _prune(root, paths)
    _drop(journal)
    return begun


def _stage(root: Path, journal: Path, files: Mapping[str, bytes | None]) -> None:
    shutil.rmtree(journal, ignore_errors=True)
    (journal / "new").mkdir(parents=True)
    (journal / "old").mkdir()
    for number, (path, data) in enumerate(files.items()):
        target = root / path
        exists = target.exists()
        if exists:
            shutil.copy2(target, journal / "old" / str(number))
        if data is not None:
            new = journal / "new" / str(number)
            new.write_bytes(data)
            os.chmod(new, target.stat().st_mode & 0o7777 if exists else 0o644)
    temp = journal / f"{INDEX}.tmp"
    temp.write_text(json.dumps(list(files)), encoding="utf-8")
    os.sync()
    os.replace(temp, journal / INDEX)


def _place(new: Path, target: Path) -> None:
    drop_bytecode(target)
    if new.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, target)
    else:
        target.unlink(missing_ok=True)


def _restore(old: Path, target: Path) -> None:
    drop_bytecode(target)
    if old.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        temp = old.with_suffix(".back")
        shutil.copy2(old, temp)
        os.replace(temp, target)
    else:
        target.unlink(missing_ok=True)


def drop_bytecode(target: Path) -> None:
    """Remove the compiled forms of one Python file, which may carry the same second and size."""
    if target.suffix == ".py":
        for cached in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            cached.unlink(missing_ok=True)


def _prune(root: Path, paths: list[str]) -> None:
    """Remove the folders that the paths leave empty, upwards, never `root` itself."""
    for path in paths:
        folder = (root / path).parent
        while folder != root and _remove_empty(folder):
            folder = folder.parent


def _remove_empty(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        (folder / "__pycache__").rmdir()
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _drop(journal: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(journal / INDEX)
    shutil.rmtree(journal, ignore_errors=True)
