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

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import read_series
from vllm_r3.ship.bundle import Bundle, write_bundle
from vllm_r3.ship.parts import PartWriter

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
NAME = f"vllm-r3-0.21.0+r3.1-cpu-cp{PYTHON.replace('.', '')}.tar"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A bundle of wheels that are only names and bytes."""
    locked = tmp_path / "locked"
    (locked / "tool").mkdir(parents=True)
    (locked / "tool" / "uv-0.9-py3-none-x.whl").write_bytes(b"uv")
    for name in ("b-2-py3-none-any.whl", "a-1-py3-none-any.whl"):
        (locked / name).write_bytes(name.encode() * 1000)
    vllm = tmp_path / "vllm-0.21.0+r3.1.cpu-cp38-abi3-linux_x86_64.whl"
    vllm.write_bytes(b"vllm")
    own = tmp_path / "vllm_r3-0.1.0-py3-none-any.whl"
    own.write_bytes(b"own")
    return Bundle(read_series(), "cpu", vllm, own, locked)


def joined(dest: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(dest.glob(f"{NAME}*")))


def test_archive_holds_the_wheels_and_pins_them(bundle: Bundle, tmp_path: Path) -> None:
    write_bundle(bundle, tmp_path / "out")
    with tarfile.open(fileobj=io.BytesIO(joined(tmp_path / "out"))) as archive:
        names = archive.getnames()
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
    assert text.startswith((bundle.series.folder / "locks" / "cpu.txt").read_text())
    assert text.endswith(
        "vllm==0.21.0+r3.1.cpu \\\n"
        f"    --hash=sha256:{hashlib.sha256(b'vllm').hexdigest()}\n"
        "vllm-r3==0.1.0 \\\n"
        f"    --hash=sha256:{hashlib.sha256(b'own').hexdigest()}\n"
    )


def test_two_bundles_of_the_same_wheels_are_the_same_bytes(bundle: Bundle, tmp_path: Path) -> None:
    first = write_bundle(bundle, tmp_path / "one")
    os.utime(bundle.vllm, (1, 1))
    bundle.own.chmod(0o600)
    assert write_bundle(bundle, tmp_path / "two") == first


@pytest.mark.parametrize("size", [1000, 4096, 10**9])
def test_parts_joined_are_the_archive(bundle: Bundle, tmp_path: Path, size: int) -> None:
    write_bundle(bundle, tmp_path / "whole")
    write_bundle(bundle, tmp_path / "parts", size)
    assert joined(tmp_path / "parts") == joined(tmp_path / "whole")
    parts = sorted((tmp_path / "parts").glob(f"{NAME}.*"))
    assert [path.stat().st_size for path in parts[:-1]] == [size] * (len(parts) - 1)
    assert 0 < parts[-1].stat().st_size <= size


def test_checksums_name_every_file(bundle: Bundle, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    write_bundle(bundle, dest, 20000)
    lines = (dest / "SHA256SUMS").read_text().splitlines()
    assert lines == [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(dest.iterdir())
        if path.name != "SHA256SUMS"
    ]


def test_folder_in_use_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(R3Error) as caught:
        write_bundle(bundle, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: expected a new or empty folder, found files; choose another one"
    )


def test_bundle_without_uv_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    next((bundle.locked / "tool").glob("uv-*")).unlink()
    with pytest.raises(R3Error) as caught:
        write_bundle(bundle, tmp_path / "out")
    assert str(caught.value) == (
        f"{bundle.locked}: expected locked wheels and tool/uv-*.whl, run build.sh"
    )


@pytest.mark.parametrize("pieces", [[b"abcdefg"], [b"abc", b"", b"defg"], [b"abcd", b"efg"]])
def test_parts_do_not_depend_on_how_they_are_written(tmp_path: Path, pieces: list[bytes]) -> None:
    with PartWriter(tmp_path, "x", 3) as writer:
        for piece in pieces:
            assert writer.write(piece) == len(piece)
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {"x.000": b"abc", "x.001": b"def", "x.002": b"g"}
    assert writer.sums == {n: hashlib.sha256(data).hexdigest() for n, data in found.items()}


def test_no_empty_part_follows_a_full_one(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "x", 3) as writer:
        writer.write(b"abcdef")
    assert sorted(writer.sums) == ["x.000", "x.001"]


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
def made(bundle: Bundle, tmp_path: Path) -> Path:
    dest = tmp_path / "made"
    write_bundle(bundle, dest, 20000)
    return dest


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
