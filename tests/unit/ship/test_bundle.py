"""The offline bundle: same wheels, same bytes; its installer checks before it acts."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from build_script import SCRIPT, sourced

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
NAME = f"vllm-r3-0.21.0+r3.1-cpu-cp{PYTHON.replace('.', '')}.tar"


class Bundler:
    """build.sh's own step on wheels that are only names and bytes, in a folder of `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.vllm = root / "vllm-0.21.0+r3.1.cpu-cp38-abi3-linux_x86_64.whl"
        self.vllm.write_bytes(b"vllm")
        self.own = root / "self" / "vllm_r3-0.1.0-py3-none-any.whl"
        self.own.parent.mkdir()
        self.own.write_bytes(b"own")

    def make(self, name: str, part_size: int = 0, umask: str = "022") -> Path:
        locked = self.root / "bundle"
        for path, data in (
            ("tool/uv-0.9-py3-none-x.whl", b"uv"),
            ("wheels/b-2-py3-none-any.whl", b"b" * 30000),
            ("wheels/a-1-py3-none-any.whl", b"a" * 30000),
        ):
            (locked / path).parent.mkdir(parents=True, exist_ok=True)
            (locked / path).write_bytes(data)
        dest = self.root / name
        body = f"umask {umask}\nBUILD={self.root} PY={sys.executable} WHEEL={self.vllm}\n"
        done = sourced(body + f"make_bundle cpu {dest} {part_size}\n")
        assert done.returncode == 0, done.stderr
        whole = hashlib.sha256((dest / "SHA256SUMS").read_bytes()).hexdigest()
        assert done.stdout == f"sha256 of SHA256SUMS, to compare by another way: {whole}\n"
        return dest


@pytest.fixture
def bundler(tmp_path: Path) -> Bundler:
    return Bundler(tmp_path)


def joined(dest: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(dest.glob(f"{NAME}*")))


def test_archive_holds_the_wheels_and_pins_them(bundler: Bundler) -> None:
    with tarfile.open(fileobj=io.BytesIO(joined(bundler.make("out")))) as archive:
        names = [member.name for member in archive if member.isfile()]
        requirements = archive.extractfile("requirements.txt")
        assert requirements is not None
        text = requirements.read().decode()
    assert names == [
        "LICENSE",
        "requirements.txt",
        "tool/uv-0.9-py3-none-x.whl",
        "wheels/a-1-py3-none-any.whl",
        "wheels/b-2-py3-none-any.whl",
        "wheels/vllm-0.21.0+r3.1.cpu-cp38-abi3-linux_x86_64.whl",
        "wheels/vllm_r3-0.1.0-py3-none-any.whl",
    ]
    assert text == (SCRIPT.parent / "patches" / "v0.21.0" / "locks" / "cpu.txt").read_text() + (
        f"vllm==0.21.0+r3.1.cpu --hash=sha256:{hashlib.sha256(b'vllm').hexdigest()}\n"
        f"vllm-r3==0.1.0 --hash=sha256:{hashlib.sha256(b'own').hexdigest()}\n"
    )


def test_two_bundles_of_the_same_wheels_are_the_same_bytes(bundler: Bundler) -> None:
    first = bundler.make("one", 20000)
    os.utime(bundler.vllm, (1, 1))
    bundler.own.chmod(0o600)
    second = bundler.make("two", 20000, umask="077")
    sums = (first / "SHA256SUMS").read_text()
    assert (second / "SHA256SUMS").read_text() == sums
    assert sums.splitlines() == [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(first.iterdir())
        if path.name != "SHA256SUMS"
    ]


@pytest.mark.parametrize("size", [1000, 4096, 10**9])
def test_parts_joined_are_the_archive(bundler: Bundler, size: int) -> None:
    parts = bundler.make("parts", size)
    assert joined(parts) == joined(bundler.make("whole"))
    files = sorted(parts.glob(f"{NAME}.*"))
    assert files[0].name == f"{NAME}.000"
    assert [path.stat().st_size for path in files[:-1]] == [size] * (len(files) - 1)
    assert 0 < files[-1].stat().st_size <= size


# --- the installer ---


def install(dest: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(dest / "install.sh"), *args],
        env={**os.environ, "PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def made(bundler: Bundler) -> Path:
    return bundler.make("made", 20000)


def test_installer_refuses_what_it_cannot_use(made: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 3.9\n")
    python.chmod(0o755)
    env = str(tmp_path / "env")
    for args, settings, status, message in (
        ([], {}, 2, "expected one argument, the folder of the environment"),
        ([made], {}, 1, f"{made}: expected a new or empty folder, found files; choose another one"),
        (
            [env],
            {"PYTHON": str(python)},
            1,
            f"expected CPython {PYTHON}, found 3.9 ({python}); install it, "
            "or set PYTHON=/path/to/it",
        ),
    ):
        done = install(made, *map(str, args), **settings)
        assert (done.returncode, done.stderr) == (status, f"install.sh: {message}\n")
    assert not Path(env).exists()


def test_installer_refuses_a_bundle_that_is_not_as_it_was_made(made: Path, tmp_path: Path) -> None:
    def refusal() -> str:
        done = install(made, str(tmp_path / "env"))
        assert (done.returncode, list((tmp_path / "env").iterdir())) == (1, [])
        return done.stderr

    part = made / f"{NAME}.000"
    part.write_bytes(b"x" + part.read_bytes()[1:])
    (made / f"{NAME}.001").unlink()
    words = refusal()
    assert f"{NAME}.000: FAILED\n" in words and f"{NAME}.001: FAILED open or read" in words
    assert f"install.sh: {made}: a file is not what was bundled (above); copy it" in words
    (made / "SHA256SUMS").unlink()
    assert refusal().splitlines()[-1] == (
        f"install.sh: {made}: expected SHA256SUMS, found none; copy the whole bundle again"
    )
