"""`python -m vllm_r3.wheel.requirements cpu|cuda`: what the pinned wheel needs, for the lock.

Prints the wheel's requirements without its extras, one a line, with the change that the patched
wheel's metadata has. Only `build.sh lock` calls it.
"""

from __future__ import annotations

import sys
import zipfile
from email.parser import BytesHeaderParser
from pathlib import Path

from vllm_r3.series.folder import read_series
from vllm_r3.series.source import pinned_wheel
from vllm_r3.wheel.archive import info_folder
from vllm_r3.wheel.metadata import patched_metadata

# intel-openmp's wheels disagree about this one, so a lock for every platform would leave it out
UNSAID = {"cpu": ["intel-cmplr-lib-ur==2024.2.1; platform_machine == 'x86_64'"], "cuda": []}


def requirements(wheel: Path, target: str) -> list[str]:
    """Return the requirements of a wheel for a target."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{info_folder(archive, wheel)}/METADATA")
    fields = BytesHeaderParser().parsebytes(patched_metadata(metadata, "0"))
    needs = [str(need) for need in fields.get_all("Requires-Dist", [])]
    return [need for need in needs if "extra ==" not in need] + UNSAID[target]


if __name__ == "__main__":
    chosen = sys.argv[1]
    print("\n".join(requirements(pinned_wheel(read_series().pin, chosen), chosen)))
