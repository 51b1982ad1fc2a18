"""Check a series folder and report everything that is wrong at once.

What needs only the folder comes first; with the sources of the pinned wheel every prefix is applied
strictly and compiled; with an interpreter that has vLLM's dependencies every prefix is imported,
each in a process of its own (`import_probe`): one that cannot be imported breaks `git bisect` for
whoever comes later. Prefixes that were imported once are remembered.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_r3.errors import R3Error
from vllm_r3.series import folder as folders
from vllm_r3.series.folder import SUMS, Pin, Series, render_sums
from vllm_r3.series.patch import Patch, apply_patch, blobs, parse_patch, slug

# Subjects and bodies that `git am` would cut: a patch must come out of it as it went in.
CUTS_MESSAGE = re.compile(r"^(---|diff -|Index: |From: )", re.MULTILINE)
PROBE = Path(__file__).with_name("import_probe.py")
# An import is no run: keep it off the network and off the compilers.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


class Finding(NamedTuple):
    """One problem: `phrase` is one of a few fixed words, `where` a path, `detail` may be empty."""

    phrase: str
    where: str
    detail: str = ""

    def __str__(self) -> str:
        return f"  {self.phrase:<11} {self.where}" + (f": {self.detail}" if self.detail else "")


def verify_folder(folder: Path, pin: Pin) -> tuple[list[Finding], list[Patch]]:
    """Check what the folder alone can tell; return the patches that could be read, too."""
    order = [line for line in folders.read_lines(folder) if folders.is_patch(line)]
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.patch"))}
    findings = [Finding("twice", name) for name in sorted({n for n in order if order.count(n) > 1})]
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
    return findings + [f for patch in patches for f in _check_patch(patch, pin)], patches


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
    known = scratch / "imported-prefixes"
    done = known.read_text().split() if known.exists() else []
    keys = _prefix_keys(series, target, python)
    if set(keys) <= set(done):
        return
    with tempfile.TemporaryDirectory(prefix="prefixes-", dir=scratch) as temp:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(temp)
        if target == "cpu":  # vLLM takes the CPU platform if the version of `vllm` has "cpu" in it
            info = Path(temp, "vllm-0+cpu.dist-info")
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
        names = ["the unpatched wheel", *series.order]
        states = _states(series.patches(), Path(temp), [key in done for key in keys])
        for key, name, words in zip(keys, names, _probe(states, python, temp), strict=False):
            if words:
                yield Finding("no import", name, words)
            done += [] if words else [key]
            if words and name == names[0]:
                break  # so will all others
    known.write_text("\n".join(key for key in keys if key in done))


def _prefix_keys(series: Series, target: str, python: Path) -> list[str]:
    """Return what each prefix depends on, hashed; the first is the unpatched wheel."""
    wheel = series.pin.wheels[target]
    salt = f"{python} {wheel.sha256}\n".encode() + (series.folder / wheel.lock).read_bytes()
    lines = render_sums(series.raw).splitlines(keepends=True)
    return [folders.sha256(salt + b"".join(lines[:n])) for n in range(len(lines) + 1)]


def _states(patches: list[Patch], root: Path, skip: list[bool]) -> Iterator[dict[str, object]]:
    """Yield for each prefix which files change and which modules to import, none if `skip`."""
    paths = {path: root / path for path in blobs(patches)}
    files = {path: at.read_bytes() if at.is_file() else None for path, at in paths.items()}
    for patch, skipped in zip([None, *patches], skip, strict=True):
        changed = [change.path for change in patch.changes] if patch else []
        if patch:
            apply_patch(patch, files)
        texts = {p: None if (d := files[p]) is None else d.decode("latin-1") for p in changed}
        python = [p for p, data in files.items() if p.endswith(".py") and data is not None]
        names = [p[:-3].removesuffix("/__init__").replace("/", ".") for p in python]
        yield {"files": texts, "modules": [] if skipped else sorted({"vllm", *names})}


def _probe(states: Iterator[dict[str, object]], python: Path, root: str) -> Iterator[str]:
    """Yield the error of each state, empty if none."""
    env = {**os.environ, **ENVIRONMENT}
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):  # compiling vLLM each time takes seconds
        env.pop(name, None)
    text = "".join(json.dumps(state) + "\n" for state in states)
    done = subprocess.run(
        [python, PROBE, root], input=text, env=env, cwd=root, capture_output=True, text=True
    )
    yield from map(json.loads, done.stdout.splitlines())
    yield f"the interpreter ended: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}"


def _check_pin(folder: Path, pin: Pin) -> Iterator[Finding]:
    for target, wheel in pin.wheels.items():
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
    bad = [name for name, data in listed.items() if render_sums({name: data}) not in lines]
    yield from (Finding("differs", name, f"from {SUMS}") for name in bad)
    if not bad and found != render_sums(listed):
        yield Finding("differs", SUMS, "expected one line a patch, in their order")


def _check_patch(patch: Patch, pin: Pin) -> Iterator[Finding]:
    if patch.name != slug(patch.subject):
        yield Finding("misnamed", patch.name, f"its subject gives {slug(patch.subject)}")
    for path in (change.path for change in patch.changes):
        if any(path == p or p.endswith("/") and path.startswith(p) for p in pin.target_specific):
            yield Finding("one target", patch.name, f"{path} differs between the wheels")
    if CUTS_MESSAGE.search(patch.body):
        yield Finding("cut", patch.name, "git am would end the message at a line of it")
    if "\n\n" not in patch.body.strip():
        yield Finding("no message", patch.name, "expected a paragraph of why, then the trailers")
    reason = patch.trailers.get("Reason", "")
    if reason and not re.match(r"(temporary|permanent)([,;:\s]|$)", reason):
        yield Finding("bad reason", patch.name, f"expected temporary or permanent, got {reason}")
    elif reason.startswith("temporary") and "Remove-when" not in patch.trailers:
        yield Finding("no exit", patch.name, "temporary, but no Remove-when")
    for key, phrase in (("Reason", "reason"), ("Upstream", "upstream"), ("Tested", "tests")):
        if key not in patch.trailers:
            yield Finding(f"no {phrase}", patch.name)
