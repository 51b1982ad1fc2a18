"""Make a module of this folder an installed platform plugin, which every vLLM process finds."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent


def write_plugin(folder: Path, module: str) -> str:
    """Write the metadata that names `module`'s `register` to vLLM.

    Returns:
        What to put on PYTHONPATH: `folder`, this folder with the module, and the one above it.
    """
    name = f"r3_{module}"
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1\n"
    (info / "METADATA").write_text(metadata)
    entry = f"[vllm.platform_plugins]\n{name} = {module}:register\n"
    (info / "entry_points.txt").write_text(entry)
    return os.pathsep.join([str(folder), str(HERE), str(HERE.parent)])
