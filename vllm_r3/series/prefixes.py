"""Import every prefix of the series for real: vLLM with the first n patches, for each n.

Lays the pinned wheel out in a folder once, then for each prefix writes the files that changed, and
has an interpreter with vLLM's dependencies import every module that the whole series touches, in a
process of its own (`import_probe`). A prefix that cannot be imported breaks `git bisect` for
whoever comes later.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from vllm_r3.series.findings import Finding
from vllm_r3.series.folder import apply_patch, touched
from vllm_r3.series.patchfile import Patch
from vllm_r3.series.pin import PinnedWheel
from vllm_r3.series.transaction import drop_bytecode

PROBE = Path(__file__).with_name("import_probe.py")
Ask = Callable[[list[str]], str]
# An import is no run: keep it off the network and off the compilers.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def can_import(python: Path) -> bool:
    """Tell whether an interpreter has what vLLM imports first."""
    done = subprocess.run(
        [python, "-c", "import importlib.util as u; exit(not u.find_spec('torch'))"],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def import_prefixes(
    patches: list[Patch], wheel: Path, pinned: PinnedWheel, python: Path, scratch: Path
) -> Iterator[Finding]:
    """Yield a finding for each prefix that cannot be imported.

    Args:
        wheel: the pinned wheel, whose hash was checked.
        python: an interpreter with vLLM's dependencies.
        scratch: a folder on a disk with half a GiB free; it is left as it was.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="prefixes-", dir=scratch))
    try:
        _lay_out(wheel, pinned, root)
        with _prober(python, root) as ask:
            yield from _import_each(patches, root, ask)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _import_each(patches: list[Patch], root: Path, ask: Ask) -> Iterator[Finding]:
    files = {path: _read(root / path) for path in touched(patches)}
    words = ask(_modules(files))
    if words:
        yield Finding("no import", "the unpatched wheel", words)
        return
    for patch in patches:
        apply_patch(patch, files)
        for change in patch.changes:
            _write(root / change.path, files[change.path])
        words = ask(_modules(files))
        if words:
            yield Finding("no import", patch.name, words)


@contextlib.contextmanager
def _prober(python: Path, root: Path) -> Iterator[Ask]:
    """Start import_probe.py; yield a function from module names to the error, empty if none."""
    env = {**os.environ, **ENVIRONMENT}
    env.pop("PYTHONPATH", None)
    with (
        tempfile.TemporaryFile("w+") as talk,
        subprocess.Popen(
            [python, PROBE, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=talk,
            text=True,
            env=env,
            cwd=root,
        ) as process,
    ):

        def ask(modules: list[str]) -> str:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(modules) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            return json.loads(line) if line else _last_line(talk)

        try:
            yield ask
        finally:
            process.kill()


def _last_line(talk: TextIO) -> str:
    talk.seek(0)
    lines = talk.read().strip().splitlines()
    return f"the interpreter ended: {lines[-1] if lines else 'without a word'}"


def _lay_out(wheel: Path, pinned: PinnedWheel, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    if pinned.target == "cpu":  # vLLM takes the CPU platform when `vllm` has a version with "cpu"
        info = root / "vllm-0+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")


def _modules(files: Mapping[str, bytes | None]) -> list[str]:
    names = [p for p, data in files.items() if p.endswith(".py") and data is not None]
    names = [n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in names]
    return sorted({"vllm", *names})


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _write(path: Path, data: bytes | None) -> None:
    drop_bytecode(path)
    if data is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
