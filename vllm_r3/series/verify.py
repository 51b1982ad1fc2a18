"""Check a series folder and report everything that is wrong at once.

What needs only the folder comes first; with the sources of the pinned wheel every prefix is applied
strictly and compiled; with an interpreter that has vLLM's dependencies every prefix is imported,
each in a process of its own (`import_probe`): one that cannot be imported breaks `git bisect` for
whoever comes later. Prefixes that were imported once are remembered.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import (
    SUMS,
    TARGETS,
    Pin,
    Series,
    is_patch,
    read_lines,
    render_sums,
    sha256,
)
from vllm_r3.series.installed import drop_bytecode
from vllm_r3.series.patch import Patch, apply_patch, blobs, parse_patch, slug

REASONS = ("temporary", "permanent")
# Subjects and bodies that `git am` would cut: a patch must come out of it as it went in.
CUTS_MESSAGE = re.compile(r"^(---|diff -|Index: |From: )", re.MULTILINE)
PROBE = Path(__file__).with_name("import_probe.py")
# An import is no run: keep it off the network and off the compilers.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
IMPORTED = "imported-prefixes"
Ask = Callable[[list[str]], str]


@dataclass(frozen=True)
class Finding:
    """One problem: `phrase` is one of a few fixed words, `where` a path, `detail` may be empty."""

    phrase: str
    where: str
    detail: str = ""

    def __str__(self) -> str:
        return f"  {self.phrase:<11} {self.where}" + (f": {self.detail}" if self.detail else "")


def verify_folder(folder: Path, pin: Pin) -> tuple[list[Finding], list[Patch]]:
    """Check what the folder alone can tell.

    Returns:
        The findings, and the patches that could be read, in order.
    """
    order = [line for line in read_lines(folder) if is_patch(line)]
    findings = [Finding("twice", name) for name in sorted({n for n in order if order.count(n) > 1})]
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.patch"))}
    findings += [Finding("missing", name) for name in dict.fromkeys(order) if name not in files]
    findings += [Finding("unlisted", name) for name in files if name not in order]
    findings += _check_pin(folder, pin)
    listed = {name: files[name] for name in order if name in files}
    findings += _check_sums(folder, listed)
    patches: list[Patch] = []
    for name, data in listed.items():
        try:
            patches.append(parse_patch(name, data))
        except R3Error as error:
            findings.append(Finding("malformed", name, str(error).removeprefix(f"{name}: ")))
    for patch in patches:
        findings += _check_patch(patch, pin)
    return findings, patches


def verify_sources(patches: list[Patch], sources: Mapping[str, bytes]) -> Iterator[Finding]:
    """Apply every prefix strictly to the wheel's Python files; compile what each one touched."""
    files: dict[str, bytes | None] = dict(sources)
    for patch in patches:
        try:
            apply_patch(patch, files)
        except R3Error as error:
            yield Finding("rejected", patch.name, str(error))
            return
        for path, data in ((change.path, files[change.path]) for change in patch.changes):
            try:
                if data is not None and path.endswith(".py"):
                    compile(data, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                yield Finding("no compile", patch.name, f"{path}: {error}")


def can_import(python: Path) -> bool:
    """Return whether an interpreter has what vLLM imports first."""
    command = [python, "-c", "import importlib.util as u; exit(not u.find_spec('torch'))"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def import_prefixes(
    series: Series, target: str, wheel: Path, python: Path, scratch: Path
) -> Iterator[Finding]:
    """Yield a finding for each prefix that cannot be imported.

    Args:
        wheel: the pinned wheel of `target`, whose hash was checked.
        python: an interpreter with vLLM's dependencies.
        scratch: a folder on a disk with half a GiB free; what was imported is remembered there.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    known = scratch / IMPORTED
    done = known.read_text().split() if known.exists() else []
    keys = _prefix_keys(series, target, python)
    if set(keys) <= set(done):
        return
    root = Path(tempfile.mkdtemp(prefix="prefixes-", dir=scratch))
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root)
        if target == "cpu":  # vLLM takes the CPU platform if the version of `vllm` has "cpu" in it
            (root / "vllm-0+cpu.dist-info").mkdir()
            (root / "vllm-0+cpu.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0+cpu\n")
        with _prober(python, root) as ask:
            for key, name, words in _import_each(series.patches(), root, ask, keys, done):
                if words:
                    yield Finding("no import", name, words)
                else:
                    done.append(key)
    finally:
        known.write_text("\n".join(key for key in keys if key in done))
        shutil.rmtree(root, ignore_errors=True)


def _prefix_keys(series: Series, target: str, python: Path) -> list[str]:
    """Return what each prefix depends on, hashed; the first is the unpatched wheel."""
    wheel = series.pin.wheels[target]
    salt = f"{python} {wheel.sha256}\n".encode() + (series.folder / wheel.lock).read_bytes()
    names = series.order
    prefixes = ({name: series.raw[name] for name in names[:n]} for n in range(len(names) + 1))
    return [sha256(salt + render_sums(prefix)) for prefix in prefixes]


def _import_each(
    patches: list[Patch], root: Path, ask: Ask, keys: list[str], done: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield key, name and error (empty if none) of each prefix that is not in `done`."""
    paths = [root / path for path in blobs(patches)]
    files = {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in paths
    }
    for key, patch in zip(keys, [None, *patches], strict=True):
        if patch:
            apply_patch(patch, files)
            for change in patch.changes:
                _write(root / change.path, files[change.path])
        if key not in done:
            words = ask(_modules(files))
            yield key, patch.name if patch else "the unpatched wheel", words
            if words and not patch:
                return


def _write(path: Path, data: bytes | None) -> None:
    drop_bytecode(path)
    path.unlink(missing_ok=True)
    if data is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _modules(files: Mapping[str, bytes | None]) -> list[str]:
    names = [p for p, data in files.items() if p.endswith(".py") and data is not None]
    names = [n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in names]
    return sorted({"vllm", *names})


@contextlib.contextmanager
def _prober(python: Path, root: Path) -> Iterator[Ask]:
    """Start import_probe.py; yield a function from module names to the error, empty if none."""
    env = {**os.environ, **ENVIRONMENT}
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):  # compiling vLLM each time costs seconds
        env.pop(name, None)
    with (
        tempfile.TemporaryFile("w+") as talk,
        subprocess.Popen(
            [python.absolute(), PROBE, root],
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


def _check_pin(folder: Path, pin: Pin) -> Iterator[Finding]:
    for target in TARGETS:
        wheel = pin.wheels[target]
        if not re.fullmatch(r"[0-9a-f]{64}", wheel.sha256):
            yield Finding("bad pin", f"pin.toml wheel.{target}", "expected a full sha256")
        if wheel.version != pin.version:
            yield Finding("bad pin", f"pin.toml wheel.{target}", f"is not vLLM {pin.vllm}")
        if not (folder / wheel.lock).is_file():
            yield Finding("missing", wheel.lock)
    if folder.name != pin.vllm:
        yield Finding("bad pin", "pin.toml", f"{pin.vllm} in a folder named {folder.name}")


def _check_sums(folder: Path, listed: Mapping[str, bytes]) -> Iterator[Finding]:
    """Compare the patches with SHA256SUMS, which has their order too."""
    file = folder / SUMS
    found = file.read_bytes() if file.exists() else b""
    lines = found.splitlines(keepends=True)
    bad = [n for n, data in listed.items() if render_sums({n: data}) not in lines]
    yield from (Finding("differs", name, f"from {SUMS}") for name in bad)
    if not bad and found != render_sums(listed):
        yield Finding("differs", SUMS, "expected one line a patch, in their order")


def _check_patch(patch: Patch, pin: Pin) -> Iterator[Finding]:
    if patch.name != slug(patch.subject):
        yield Finding("misnamed", patch.name, f"its subject gives {slug(patch.subject)}")
    if not patch.changes:
        yield Finding("empty", patch.name)
    specific = pin.target_specific
    for change in patch.changes:
        if any(change.path == p or p.endswith("/") and change.path.startswith(p) for p in specific):
            yield Finding("one target", patch.name, f"{change.path} differs between the wheels")
    if CUTS_MESSAGE.search(patch.body):
        yield Finding("cut", patch.name, "git am would end the message at a line of it")
    trailers = patch.trailers
    if len(patch.body.strip().split("\n\n")) < 2:
        yield Finding("no message", patch.name, "expected a paragraph of why, then the trailers")
    reason = trailers.get("Reason", "")
    if not reason:
        yield Finding("no reason", patch.name)
    elif reason.split(maxsplit=1)[0].rstrip(",;:") not in REASONS:
        yield Finding("bad reason", patch.name, f"expected temporary or permanent, got {reason}")
    elif reason.startswith("temporary") and "Remove-when" not in trailers:
        yield Finding("no exit", patch.name, "temporary, but no Remove-when")
    for key, phrase in (("Upstream", "no upstream"), ("Tested", "no tests")):
        if key not in trailers:
            yield Finding(phrase, patch.name)
