"""Try the series on another vLLM: per patch clean, offset or conflict.

Every patch is reported. A conflicting patch is left out whole, so a later patch that builds on it
conflicts too; the report says which was the first. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_r3.series.patchfile import Patch
from vllm_r3.series.placing import place_change


@dataclass(frozen=True)
class Verdict:
    """How one patch fits another base; `kind` is `clean`, `offset` or `conflict`."""

    patch: str
    kind: str
    path: str = ""
    hunk: int = 0
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == "conflict":
            return f"  conflict    {self.patch}: {self.path} hunk {self.hunk}: {self.detail}"
        return f"  {self.kind:<11} {self.patch}" + (f": {self.detail}" if self.detail else "")


def try_rebase(patches: list[Patch], sources: Mapping[str, bytes]) -> list[Verdict]:
    """Lay the patches, in order, over the Python files of another vLLM."""
    files: dict[str, bytes | None] = dict(sources)
    left_out: dict[str, str] = {}
    verdicts = []
    for patch in patches:
        verdict = _try_patch(patch, files, left_out)
        if verdict.kind == "conflict":
            for change in patch.changes:
                left_out.setdefault(change.path, patch.name)
        verdicts.append(verdict)
    return verdicts


def _try_patch(
    patch: Patch, files: dict[str, bytes | None], left_out: Mapping[str, str]
) -> Verdict:
    """Lay one patch over `files`; `left_out` names by path the first patch that was left out."""
    placed = {c.path: place_change(c, files.get(c.path)) for c in patch.changes}
    for path, place in placed.items():
        if place.failed_hunk:
            why = place.why
            if path in left_out:
                why += f" (and {left_out[path]}, which was left out, changes this file first)"
            return Verdict(patch.name, "conflict", path, place.failed_hunk, why)
    files.update({path: place.data for path, place in placed.items()})
    moved = [(p, o) for p, place in placed.items() for o in place.offsets if o]
    if not moved:
        return Verdict(patch.name, "clean")
    path, offset = max(moved, key=lambda item: abs(item[1]))
    return Verdict(
        patch.name, "offset", detail=f"{len(moved)} hunks moved, most {offset:+d} in {path}"
    )
