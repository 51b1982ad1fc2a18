"""Import every prefix of the series for real: vLLM with the first n patches, for each n.

Lays the pinned wheel out in a folder once, then for each prefix writes the files that changed and
starts an interpreter, which must have vLLM's dependencies, to import every module that the whole
series touches. A prefix that cannot be imported breaks `git bisect` for whoever comes later.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_r3.series.findings import Finding
from vllm_r3.series.folder import apply_patch, touched
from vllm_r3.series.patchfile import Patch
from vllm_r3.series.pin import PinnedWheel
from vllm_r3.series.transaction import drop_bytecode

PROBE = """
import importlib, importlib.util, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.path[0]), f"{name} came from {module.__file__}"
print("imported", len(sys.argv) - 1)
"""
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
        paths = touched(patches)
        files = {path: _read(root / path) for path in paths}
        words = _import(python, root, _modules(files))
        if words:
            yield Finding("no import", "the unpatched wheel", words)
            return
        for patch in patches:
            apply_patch(patch, files)
            for change in patch.changes:
                _write(root / change.path, files[change.path])
            words = _import(python, root, _modules(files))
            if words:
                yield Finding("no import", patch.name, words)
    finally:
        shutil.rmtree(root, ignore_errors=True)


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


def _import(python: Path, root: Path, modules: list[str]) -> str:
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
    probe = root / "probe.py"
    probe.write_text(PROBE.replace("sys.path[0]", repr(str(root))))
    done = subprocess.run(
        [python, probe, *modules], capture_output=True, text=True, env=env, cwd=root, check=False
    )
    if done.returncode == 0 and done.stdout.strip().endswith(f"imported {len(modules)}"):
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}, no output"]
    return lines[-1]


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _write(path: Path, data: bytes | None) -> None:
    drop_bytecode(path)
    if data is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
