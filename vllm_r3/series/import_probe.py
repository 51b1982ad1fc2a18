"""Import modules in a fresh child of one warm process, once for each line of stdin.

`prefixes` runs this file with an interpreter that has vLLM's dependencies; it imports nothing of
vllm_r3. A line of stdin is a JSON list of module names, the answer one JSON string: empty, or the
error's last line. After the first answer the process imports what vLLM imported from elsewhere
(torch and the like), so that the next children start with it; of vLLM it never imports anything.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback


def probe(root: str, modules: list[str]) -> tuple[str, list[str]]:
    """Import the modules here; return the error and the names of what came from elsewhere."""
    try:
        for name in modules:
            place = importlib.import_module(name).__file__ or ""
            if not place.startswith(root):
                return f"{name} came from {place}", []
    except BaseException:
        return traceback.format_exc().strip().splitlines()[-1], []
    return "", [name for name in sys.modules if name.split(".")[0] not in ("vllm", "__main__")]


def in_child(root: str, modules: list[str]) -> tuple[str, list[str]]:
    """Run probe in a forked child; a child that dies is an error too."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # what vLLM prints is talk
        answer = json.dumps(probe(root, modules)).encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    if not answer:
        return f"the import ended the process with status {status}", []
    words, names = json.loads(answer)
    return words, names


def main(root: str) -> None:
    """Answer each line of stdin."""
    sys.path[0] = root  # in place of this file's folder, whose names are not for others
    warm = False
    for line in sys.stdin:
        words, names = in_child(root, json.loads(line))
        print(json.dumps(words), flush=True)
        if not warm and not words:
            for name in names:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            warm = True


if __name__ == "__main__":
    main(sys.argv[1])
