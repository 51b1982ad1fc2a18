"""`python -m vllm_r3.ship.bundle`: wheels and an installer for hosts without a network.

    DEST/install.sh                      checks, unpacks, installs into a new virtual environment
    DEST/vllm-r3-VERSION-TARGET-cpNN.tar[.000 …]
        LICENSE, requirements.txt        every wheel by version and sha256
        wheels/, tool/                   what is installed; uv, which installs it
    DEST/SHA256SUMS                      written last: without it a bundle is not whole

The same wheels give the same bytes: names sorted, no times, owners or modes of the files here.
Only `build.sh bundle` calls it, with the wheels that it downloaded by the lock.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series.folder import Series, read_series
from vllm_r3.series.source import file_sha256
from vllm_r3.ship.parts import PartWriter

TEMPLATE = Path(__file__).with_name("install.sh")
EARLIEST = 315532800  # 1980-01-01, as in the wheels


@dataclass(frozen=True)
class Bundle:
    """What a bundle is made of: the patched wheel, vllm-r3's, and a folder of locked ones."""

    series: Series
    target: str
    vllm: Path
    own: Path
    locked: Path

    @property
    def name(self) -> str:
        """The name of the archive: version, target and Python."""
        version = self.series.pin.patched_version(self.target).removesuffix(".cpu")
        return f"vllm-r3-{version}-{self.target}-cp{sys.version_info[0]}{sys.version_info[1]}.tar"

    def requirements(self) -> str:
        """Return the lock, and the two wheels of this project in the same form."""
        lock = self.series.folder / self.series.pin.wheels[self.target].lock
        return lock.read_text(encoding="utf-8") + "".join(map(_pinned, (self.vllm, self.own)))

    def files(self) -> dict[str, Path | bytes]:
        """Return the members of the archive by name."""
        root = self.series.folder.parents[1]
        uv = sorted((self.locked / "tool").glob("uv-*.whl"))
        wheels = [self.vllm, self.own, *self.locked.glob("*.whl")]
        if len(uv) != 1 or len(wheels) < 3:
            raise R3Error(f"{self.locked}: expected locked wheels and tool/uv-*.whl, run build.sh")
        return {
            "LICENSE": root / "LICENSE",
            "requirements.txt": self.requirements().encode(),
            f"tool/{uv[0].name}": uv[0],
            **{f"wheels/{wheel.name}": wheel for wheel in wheels},
        }


def write_bundle(bundle: Bundle, dest: Path, part_size: int = 0) -> dict[str, str]:
    """Write a bundle into `dest`, which must be new or empty; return sha256 by file name.

    Raises:
        R3Error: `dest` is in use, a wheel is missing, or the disk is full.
    """
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise R3Error(f"{dest}: expected a new or empty folder, found files; choose another one")
    dest.mkdir(parents=True, exist_ok=True)
    try:
        with PartWriter(dest, bundle.name, part_size) as writer:
            _write_tar(bundle.files(), writer)
        install = dest / "install.sh"
        install.write_bytes(_installer(bundle))
        install.chmod(0o755)
        sums = {**writer.sums, install.name: file_sha256(install)}
        lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
        (dest / "SHA256SUMS").write_text(lines, encoding="utf-8")
    except OSError as error:
        raise R3Error(f"{dest}: could not write the bundle: {error}") from error
    return sums


def _write_tar(files: dict[str, Path | bytes], writer: PartWriter) -> None:
    with tarfile.open(fileobj=writer, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(files):
            source = files[name]
            info = tarfile.TarInfo(name)
            info.mtime = EARLIEST
            if isinstance(source, bytes):
                info.size = len(source)
                archive.addfile(info, io.BytesIO(source))
            else:
                info.size = source.stat().st_size
                with source.open("rb") as file:
                    archive.addfile(info, file)


def _installer(bundle: Bundle) -> bytes:
    sizes = sum(
        len(f) if isinstance(f, bytes) else f.stat().st_size for f in bundle.files().values()
    )
    values = {
        "NAME": bundle.name,
        "PYTHON": f"{sys.version_info[0]}.{sys.version_info[1]}",
        # the archive's content, and what it becomes: wheels unpack to about two and a half times
        "MIB": str(sizes * 7 // 2 // (1 << 20) + 1),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text.encode()


def _pinned(wheel: Path) -> str:
    match = re.match(r"([^-]+)-([^-]+)-", wheel.name)
    if match is None:
        raise R3Error(f"{wheel}: expected the name of a wheel")
    name, version = match.groups()
    return f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{file_sha256(wheel)}\n"


def main() -> int:
    """Write the bundle of build.sh."""
    parser = argparse.ArgumentParser(description="write a bundle for hosts without a network")
    parser.add_argument("--target", required=True, help="cpu or cuda")
    parser.add_argument("--dest", required=True, type=Path, help="a new or empty folder")
    parser.add_argument("--part-size", type=int, default=0, help="bytes a part (default: one file)")
    parser.add_argument("--vllm", required=True, type=Path, help="the patched wheel")
    parser.add_argument("--self", required=True, type=Path, dest="own", help="vllm-r3's wheel")
    parser.add_argument("--wheels", required=True, type=Path, help="the locked wheels")
    args = parser.parse_args()
    try:
        bundle = Bundle(read_series(), args.target, args.vllm, args.own, args.wheels)
        sums = write_bundle(bundle, args.dest, args.part_size)
    except R3Error as error:
        print(f"vllm-r3: {error}", file=sys.stderr)
        return 1
    whole = hashlib.sha256((args.dest / "SHA256SUMS").read_bytes()).hexdigest()
    print(f"{len(sums)} files; sha256 of SHA256SUMS, to compare by another way: {whole}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
