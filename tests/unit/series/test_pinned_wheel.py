"""The pinned wheel is the file with the pinned hash, wherever it comes from."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
from sample_series import SOURCES, Lab

from vllm_r3.errors import R3Error
from vllm_r3.series import pinned_wheel as source
from vllm_r3.series.folder import read_pin


def test_cached_wheel_is_found_without_a_download(lab: Lab) -> None:
    for target, path in lab.wheels.items():
        assert source.pinned_wheel(read_pin(lab.folder), target, fetch=False) == path


def test_other_hash_is_refused_with_both_hashes(lab: Lab) -> None:
    path = lab.wheels["cpu"]
    want = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes() + b"\0")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(R3Error) as caught:
        source.pinned_wheel(read_pin(lab.folder), "cpu")
    assert str(caught.value) == (
        f"{path} is not the pinned wheel: expected sha256 {want}, found {found}; "
        "delete it to have it downloaded again"
    )


def test_named_wheel_is_checked_too(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_R3_WHEEL", str(lab.wheels["cuda"]))
    assert source.pinned_wheel(read_pin(lab.folder), "cuda") == lab.wheels["cuda"]
    with pytest.raises(R3Error, match=r"is not the pinned wheel: .* \$VLLM_R3_WHEEL names it"):
        source.pinned_wheel(read_pin(lab.folder), "cpu")


def test_download_asks_for_the_pinned_file_alone_and_a_failure_says_what_to_do(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = lab.root / "empty"
    python = lab.root / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >{lab.root}/asked\necho no route >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setenv("VLLM_R3_CACHE", str(cache))
    monkeypatch.setattr(sys, "executable", str(python))
    wheel = read_pin(lab.folder).wheels["cuda"]
    with pytest.raises(R3Error) as caught:
        source.pinned_wheel(read_pin(lab.folder), "cuda")
    assert str(caught.value) == (
        f"could not download {wheel.file} (sha256 {wheel.sha256}): no route; "
        "fetch it by hand and set VLLM_R3_WHEEL=/path/to/it"
    )
    assert list(cache.iterdir()) == []
    asked = (lab.root / "asked").read_text()
    assert " --no-deps --only-binary=:all: --require-hashes --requirement " in asked
    assert " --platform manylinux_2_24_x86_64 " in asked


def test_only_python_files_of_vllm_are_sources(lab: Lab) -> None:
    files = source.python_files(lab.wheels["cpu"])
    assert set(files) == set(SOURCES)


@pytest.mark.parametrize("data", [b"", b"no zip"])
def test_file_that_is_no_wheel_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(data)
    with pytest.raises(R3Error, match=r"x\.whl: expected a vLLM wheel, could not read it"):
        source.python_files(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("commit = ", "comit = ", "a field is missing, unknown or wrong: 'commit'"),
        ("revision = 1", 'revision = "one"', "a field is missing, unknown or wrong: invalid"),
        ("[wheel.cpu]\n", "[wheel.cpu]\nextra = 1\n", "a field is missing, unknown or wrong: "),
        ("vllm = ", "vllm ", "not valid TOML"),
    ],
)
def test_bad_pin_is_refused_by_field(lab: Lab, old: str, new: str, message: str) -> None:
    path = lab.folder / "pin.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(R3Error, match=f"pin.toml: {message}"):
        read_pin(lab.folder)
