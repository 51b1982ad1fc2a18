"""Import modules of a vLLM that changes, in a fresh child of one warm process for each state of it.

`verify` runs this file with an interpreter that has vLLM's dependencies; it imports nothing of
vllm_r3. A line of stdin is a JSON object: `files` to write (path -> text as latin-1, null: remove)
and the `modules` to import then. The answer is one JSON string: empty, or the error's last line.
After the first answer the process imports what vLLM imported from elsewhere (torch and the like),
so that the next children start with it; of vLLM it never imports anything.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from pathlib import Path


def probe(root: str, modules: list[str]) -> tuple[str, list[str]]:
    """Import the modules here; return the error and the names of what came from elsewhere."""
    try:
        for name in modules:
            place = importlib.import_module(name).__file__ or ""
            if not place.startswith(root):
                return f"{name} came from {place}", []
    except BaseException:
        return traceback.format_exc().strip().splitlines()[-1], []
    # smg_grpc_servicer.vllm imports vLLM, which the warm process must not have
    return "", [name for name in sys.modules if not {"vllm", "__main__"} & set(name.split("."))]


def in_child(root: str, modules: list[str]) -> tuple[str, list[str]]:
    """Run probe in a forked child; a child that dies is an error too."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # what vLLM prints is talk
        with os.fdopen(writer, "w") as pipe:
            json.dump(probe(root, modules), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    if not answer:
        return f"the import ended the process with status {status}", []
    return tuple(json.loads(answer))


def write(path: Path, text: str | None) -> None:
    """Write a file anew, or remove it; its bytecode may have the same second and size."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()
    path.unlink(missing_ok=True)
    if text is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))


def main(root: str) -> None:
    """Answer each line of stdin."""
    sys.path[0] = root  # in place of this file's folder, whose names are not for others
    warm = False
    for line in sys.stdin:
        asked = json.loads(line)
        for path, text in asked["files"].items():
            write(Path(root, path), text)
        words, found = in_child(root, asked["modules"]) if asked["modules"] else ("", [])
        print(json.dumps(words), flush=True)
        if not warm:
            for name in found:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            warm = bool(found)


if __name__ == "__main__":
    main(sys.argv[1])
