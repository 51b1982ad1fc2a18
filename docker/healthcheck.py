"""Exit 0 if the server of this container answers /health, else 1 with a line that says why.

Address and port are those of the container's command line (`--host`, `--port`, TLS if a key is
given), so that `docker run IMAGE MODEL --port 9000` needs no other setting; $VLLM_R3_HEALTH_URL
overrides them. Standard library only: it runs in images that have nothing else of vllm-r3.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 8
ANYWHERE = ("", "0.0.0.0", "::")


def option(words: Sequence[str], name: str) -> str | None:
    """Return the value of `--name value` or `--name=value`, None if it is not there."""
    values = [words[i + 1] for i, word in enumerate(words[:-1]) if word == name]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return values[-1] if values else None


def health_url(words: Sequence[str]) -> str:
    """Return the address of /health for a server that was started with these words."""
    scheme = "https" if option(words, "--ssl-keyfile") else "http"
    host = option(words, "--host") or ""
    host = "127.0.0.1" if host in ANYWHERE else host
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{option(words, '--port') or '8000'}/health"


def main() -> int:
    """Ask once."""
    words = Path("/proc/1/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    url = os.environ.get("VLLM_R3_HEALTH_URL") or health_url(words)
    trust = ssl._create_unverified_context()  # the server's own certificate, for another name
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=trust):
            return 0
    except (OSError, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
