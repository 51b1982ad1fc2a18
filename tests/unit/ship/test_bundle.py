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
    first = bundler.make("one")
    os.utime(bundler.vllm, (1, 1))
    bundler.own.chmod(0o600)
    second = bundler.make("two", umask="077")
    assert (first / "SHA256SUMS").read_bytes() == (second / "SHA256SUMS").read_bytes()


@pytest.mark.parametrize("size", [1000, 4096, 10**9])
def test_parts_joined_are_the_archive(bundler: Bundler, size: int) -> None:
    parts = bundler.make("parts", size)
    assert joined(parts) == joined(bundler.make("whole"))
    files = sorted(parts.glob(f"{NAME}.*"))
    assert files[0].name == f"{NAME}.000"
    assert [path.stat().st_size for path in files[:-1]] == [size] * (len(files) - 1)
    assert 0 < files[-1].stat().st_size <= size


def test_checksums_name_every_file(bundler: Bundler) -> None:
    dest = bundler.make("out", 20000)
    assert (dest / "SHA256SUMS").read_text().splitlines() == [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(dest.iterdir())
        if path.name != "SHA256SUMS"
    ]


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


def test_installer_without_folder_is_wrong_usage(made: Path) -> None:
    done = install(made)
    assert done.returncode == 2
    assert done.stderr == ("install.sh: expected one argument, the folder of the environment\n")


def test_installer_refuses_a_folder_with_files(made: Path, tmp_path: Path) -> None:
    done = install(made, str(made))
    assert done.returncode == 1
    assert done.stderr == (
        f"install.sh: {made}: expected a new or empty folder, found files; choose another one\n"
    )


def test_installer_refuses_another_python(made: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 3.9\n")
    python.chmod(0o755)
    done = install(made, str(tmp_path / "env"), PYTHON=str(python))
    assert done.returncode == 1
    assert done.stderr == (
        f"install.sh: expected CPython {PYTHON}, found 3.9 ({python}); install it, "
        "or set PYTHON=/path/to/it\n"
    )
    assert not (tmp_path / "env").exists()


def test_installer_refuses_a_changed_part_by_name(made: Path, tmp_path: Path) -> None:
    part = made / f"{NAME}.000"
    part.write_bytes(b"x" + part.read_bytes()[1:])
    done = install(made, str(tmp_path / "env"))
    assert done.returncode == 1
    assert f"{NAME}.000: FAILED" in done.stderr
    assert f"install.sh: {made}: a file is not what was bundled (above); copy it" in done.stderr
    assert list((tmp_path / "env").iterdir()) == []


def test_installer_refuses_a_missing_part(made: Path, tmp_path: Path) -> None:
    (made / f"{NAME}.001").unlink()
    done = install(made, str(tmp_path / "env"))
    assert done.returncode == 1
    assert f"{NAME}.001: FAILED open or read" in done.stderr


def test_installer_refuses_a_bundle_without_checksums(made: Path, tmp_path: Path) -> None:
    (made / "SHA256SUMS").unlink()
    done = install(made, str(tmp_path / "env"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"install.sh: {made}: expected SHA256SUMS, found none; copy the whole bundle again"
    )
