"""Check a series folder and report everything that is wrong at once.

What needs only the folder comes first; with the sources of the pinned wheel every prefix is applied
strictly and compiled; importing the prefixes is the caller's next step (`prefixes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series.findings import Finding
from vllm_r3.series.folder import apply_patch, is_patch, read_lines
from vllm_r3.series.hashes import Hashes, read_hashes, sha256
from vllm_r3.series.parsing import parse_patch
from vllm_r3.series.patchfile import Patch, slug
from vllm_r3.series.pin import TARGETS, Pin

REASONS = ("temporary", "permanent")
# Subjects and bodies that `git am` would cut: a patch must come out of it as it went in.
CUTS_MESSAGE = re.compile(r"^(---|diff -|Index: |From: )", re.MULTILINE)


def verify_folder(folder: Path, pin: Pin) -> tuple[list[Finding], list[Patch]]:
    """Check what the folder alone can tell.

    Returns:
        The findings, and the patches that could be read, in order.
    """
    lines = read_lines(folder)
    order = [line for line in lines if is_patch(line)]
    findings = [Finding("twice", name) for name in sorted({n for n in order if order.count(n) > 1})]
    order = list(dict.fromkeys(order))
    files = {path.name for path in folder.glob("*.patch")}
    findings += [Finding("missing", name) for name in order if name not in files]
    findings += [Finding("unlisted", name) for name in sorted(files - set(order))]
    findings += list(_check_pin(folder, pin))
    recorded = read_hashes(folder)
    patches: list[Patch] = []
    for name in [name for name in order if name in files]:
        data = (folder / name).read_bytes()
        findings += list(_check_hash(recorded, name, data))
        try:
            patches.append(parse_patch(name, data))
        except R3Error as error:
            findings.append(Finding("malformed", name, str(error).removeprefix(f"{name}: ")))
    findings += [Finding("stale hash", name) for name in sorted(set(recorded.patches) - set(order))]
    for patch in patches:
        findings += list(_check_patch(patch, pin))
    return findings, patches


def verify_sources(
    patches: list[Patch], sources: Mapping[str, bytes], recorded: Hashes
) -> Iterator[Finding]:
    """Apply every prefix strictly to the wheel's Python files; compile what each one touched."""
    files: dict[str, bytes | None] = dict(sources)
    for patch in patches:
        try:
            apply_patch(patch, files)
        except R3Error as error:
            yield Finding("rejected", patch.name, str(error))
            return
        for change in patch.changes:
            yield from _check_compiles(patch, change.path, files[change.path])
    touched = {change.path for patch in patches for change in patch.changes}
    for path in sorted(touched | set(recorded.files)):
        if recorded.files.get(path) != sha256(files.get(path)) or path not in touched:
            yield Finding("differs", path, "not the recorded content after the whole series")


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


def _check_hash(recorded: Hashes, name: str, data: bytes) -> Iterator[Finding]:
    if name not in recorded.patches:
        yield Finding("no hash", name)
    elif recorded.patches[name] != sha256(data):
        yield Finding("differs", name)


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
    yield from _check_message(patch)


def _check_message(patch: Patch) -> Iterator[Finding]:
    trailers = patch.trailers
    if len(patch.body.strip().split("\n\n")) < 2:
        yield Finding("no message", patch.name, "expected a paragraph of why, then the trailers")
    reason = trailers.get("Reason")
    if reason is None:
        yield Finding("no reason", patch.name)
    elif reason.split(maxsplit=1)[0].rstrip(",;:") not in REASONS:
        yield Finding("bad reason", patch.name, f"expected temporary or permanent, got {reason}")
    elif reason.startswith("temporary") and "Remove-when" not in trailers:
        yield Finding("no exit", patch.name, "temporary, but no Remove-when")
    for key, phrase in (("Upstream", "no upstream"), ("Tested", "no tests")):
        if key not in trailers:
            yield Finding(phrase, patch.name)


def _check_compiles(patch: Patch, path: str, data: bytes | None) -> Iterator[Finding]:
    if data is None or not path.endswith(".py"):
        return
    try:
        compile(data, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        yield Finding("no compile", patch.name, f"{path}: {error}")
