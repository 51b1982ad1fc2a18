"""The step of the image build that checks a base and patches it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERIES = Path(__file__).resolve().parents[1] / "series"
sys.path.insert(0, str(SERIES))

from sample_series import Lab, snapshot  # noqa: E402

from vllm_r3.errors import R3Error  # noqa: E402
from vllm_r3.series.status import read_status  # noqa: E402
from vllm_r3.ship.labels import build_arguments  # noqa: E402
from vllm_r3.ship.overlay import check_labels, check_user, patch_base  # noqa: E402


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.delenv("VLLM_R3_WHEEL", raising=False)
    made = Lab(tmp_path)
    made.write_two_patches()
    return made


def rename_version(site: Path, version: str) -> None:
    """Give an unpacked wheel another version, as an image for another CUDA has."""
    metadata = next(site.glob("vllm*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 0.21.0\n", f"Version: {version}\n"))


def test_base_is_patched_and_says_so(lab: Lab) -> None:
    site = lab.site("cuda")
    assert patch_base(lab.series(), site) == "0.21.0+r3.1"
    assert read_status(lab.series(), site).state == "patched"


def test_base_of_another_cuda_keeps_its_local_version(lab: Lab) -> None:
    site = lab.site("cuda")
    rename_version(site, "0.21.0+cu129")
    assert patch_base(lab.series(), site) == "0.21.0+r3.1.cu129"


def test_base_with_the_series_is_left_as_it_is(lab: Lab) -> None:
    site = lab.site("cuda")
    patch_base(lab.series(), site)
    before = snapshot(site)
    assert patch_base(lab.series(), site) == "0.21.0+r3.1"
    assert snapshot(site) == before


def test_modified_base_is_refused_with_every_file_and_left_as_it_is(lab: Lab) -> None:
    site = lab.site("cuda")
    for name in ("vllm/engine.py", "vllm/__init__.py"):
        (site / name).write_text("# mine\n")
    before = snapshot(site)
    with pytest.raises(R3Error) as caught:
        patch_base(lab.series(), site)
    assert str(caught.value) == (
        f"{site}: expected the Python files of the pinned wheel of vLLM 0.21.0, 2 differ:\n"
        "  vllm/__init__.py\n  vllm/engine.py\n"
        "nothing was changed; choose a base with an unmodified vLLM"
    )
    assert snapshot(site) == before


@pytest.mark.parametrize("version", ["0.21.1", "0.2", "0.22.1+cu129"])
def test_another_vllm_is_refused_with_both_versions(lab: Lab, version: str) -> None:
    site = lab.site("cuda")
    rename_version(site, version)
    with pytest.raises(R3Error) as caught:
        patch_base(lab.series(), site)
    assert str(caught.value) == (
        f"{site}: expected vLLM 0.21.0, found {version}; choose another base "
        "(--build-arg BASE_IMAGE=...)"
    )


def test_labels_are_the_pin_the_series_and_the_version(lab: Lab) -> None:
    series = lab.series()
    said = build_arguments(series)
    assert said == {"R3_PIN": "v0.21.0@abc", "R3_SERIES": series.hash, "R3_VERSION": "0.21.0+r3.1"}
    check_labels(series, said)


def test_wrong_labels_are_refused_with_the_arguments_to_pass(lab: Lab) -> None:
    series = lab.series()
    said = {**build_arguments(series), "R3_PIN": "", "R3_SERIES": "0123"}
    with pytest.raises(R3Error) as caught:
        check_labels(series, said)
    assert str(caught.value) == (
        "labels: R3_PIN: expected v0.21.0@abc, got nothing; "
        f"R3_SERIES: expected {series.hash}, got 0123; build with ./build.sh image, which passes: "
        f"--build-arg R3_PIN=v0.21.0@abc --build-arg R3_SERIES={series.hash} "
        "--build-arg R3_VERSION=0.21.0+r3.1"
    )


@pytest.mark.parametrize("user", ["0", "root", "0:0", "root:root"])
def test_user_of_the_base_is_accepted_by_name_and_number(user: str) -> None:
    check_user(user, "0")


@pytest.mark.parametrize(
    ("user", "base", "found"),
    [("0", "1000", "0"), ("root", "1000", "0"), ("nobody-here", "1000", "no such user")],
)
def test_another_user_is_refused_with_the_argument_to_pass(
    user: str, base: str, found: str
) -> None:
    with pytest.raises(R3Error) as caught:
        check_user(user, base)
    assert str(caught.value) == (
        f"the base runs as user {base}, BASE_USER is {user} ({found}); "
        f"pass --build-arg BASE_USER={base}"
    )


def test_interpreter_without_vllm_is_refused(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda n, p=None: None if n == 'vllm' else find(n, p)\n"
    )
    labels = subprocess.run(
        [sys.executable, "-m", "vllm_r3.ship.labels"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    pin, series, version = (line.split("=", 2)[2] for line in labels)
    done = subprocess.run(
        [sys.executable, "-m", "vllm_r3.ship.overlay"]
        + ["--pin", pin, "--series", series, "--version", version],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"vllm-r3: {sys.executable}: expected an installed vLLM, found none in this base\n"
    )
