"""`python -m vllm_r3.ship.labels`: what an image of this series says about itself.

Prints the build arguments of docker/Dockerfile, one a line: a label cannot be worked out inside of
a build, so it is passed in, and the build checks it against what was applied (`overlay`).
"""

from __future__ import annotations

from vllm_r3.series.folder import Series, read_series


def build_arguments(series: Series) -> dict[str, str]:
    """Return the build arguments by name: the pin, the hash of the series, the version."""
    pin = series.pin
    return {
        "R3_PIN": f"{pin.vllm}@{pin.commit}",
        "R3_SERIES": series.hash,
        "R3_VERSION": pin.patched_version("cuda"),
    }


if __name__ == "__main__":
    for name, value in build_arguments(read_series()).items():
        print(f"--build-arg={name}={value}")
