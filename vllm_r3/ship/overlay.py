"""`python -m vllm_r3.ship.overlay`: patch the vLLM of a base image, in its build.

Runs on the base's own Python, beside the vLLM to patch. Refuses a base whose vLLM is not the pinned
one, with every file that differs; refuses labels that do not say what was applied. A base that
carries this series already is left as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from vllm_r3.errors import R3Error
from vllm_r3.series.apply import apply_series
from vllm_r3.series.folder import Series, read_series
from vllm_r3.series.status import read_status
from vllm_r3.ship.labels import build_arguments


def patch_base(series: Series, root: Path) -> str:
    """Patch the vLLM in the site-packages folder `root`; return the version it has now.

    Raises:
        R3Error: it is another vLLM, or files of it differ from the pinned wheel; nothing changed.
    """
    status = read_status(series, root)
    if status.version.split("+")[0] != series.pin.version:
        raise R3Error(
            f"{root}: expected vLLM {series.pin.version}, found {status.version}; choose another "
            "base (--build-arg BASE_IMAGE=...)"
        )
    if status.files:
        raise R3Error(
            f"{root}: expected the Python files of the pinned wheel of vLLM {series.pin.version}, "
            f"{len(status.files)} differ:\n  " + "\n  ".join(status.files) + "\n"
            "nothing was changed; choose a base with an unmodified vLLM"
        )
    return apply_series(series, root).version


def check_labels(series: Series, said: Mapping[str, str]) -> None:
    """Compare the build arguments with the series that is applied.

    Raises:
        R3Error: with the arguments to pass.
    """
    want = build_arguments(series)
    wrong = [
        f"{k}: expected {v}, got {said[k] or 'nothing'}" for k, v in want.items() if said[k] != v
    ]
    if wrong:
        flags = " ".join(f"--build-arg {k}={v}" for k, v in want.items())
        raise R3Error(
            f"labels: {'; '.join(wrong)}; build with ./build.sh image, which passes: {flags}"
        )


def check_user(user: str, base_uid: str) -> None:
    """Make sure that the image will run as the base does.

    Args:
        user: the build argument BASE_USER, a name or a number, with or without a group.
        base_uid: the number of the base's user.

    Raises:
        R3Error: they are not the same, or there is no such user.
    """
    name = user.partition(":")[0]
    found = name if name.isdigit() else _uid(name)
    if found != base_uid:
        raise R3Error(
            f"the base runs as user {base_uid}, BASE_USER is {user} ({found or 'no such user'}); "
            f"pass --build-arg BASE_USER={base_uid}"
        )


def vllm_root() -> Path:
    """Return the folder that holds the vLLM of this interpreter, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise R3Error(f"{sys.executable}: expected an installed vLLM, found none in this base")
    return Path(spec.submodule_search_locations[0]).parent


def main() -> int:
    """Check, patch, report."""
    parser = argparse.ArgumentParser(description="patch the vLLM of a base image")
    parser.add_argument("--pin", required=True, help="the label vllm-r3.pin")
    parser.add_argument("--series", required=True, help="the label vllm-r3.series")
    parser.add_argument("--version", required=True, help="the label of the version")
    parser.add_argument("--user", help="the user that the image will have")
    parser.add_argument("--base-uid", type=Path, metavar="FILE", help="holds the base's user id")
    args = parser.parse_args()
    said = {"R3_PIN": args.pin, "R3_SERIES": args.series, "R3_VERSION": args.version}
    try:
        series = read_series()
        check_labels(series, said)
        if args.user:
            check_user(args.user, args.base_uid.read_text(encoding="ascii").strip())
        version = patch_base(series, vllm_root())
    except R3Error as error:
        print(f"vllm-r3: {error}", file=sys.stderr)
        return 1
    print(f"vLLM {version}: {len(series.order)} patches, series {series.hash[:12]}")
    return 0


def _uid(name: str) -> str:
    import pwd

    try:
        return str(pwd.getpwnam(name).pw_uid)
    except KeyError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
