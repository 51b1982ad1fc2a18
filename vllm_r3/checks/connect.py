"""Talk to a server under test: JSON over the standard library's HTTP client, errors in words."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from vllm_r3.errors import R3Error

TEXT = (
    "A router picks a few experts for every token, and the trainer must pick the same ones. "
    "Count from one to twelve, name the seas, then say why the order of the layers matters. "
)


@dataclass(frozen=True)
class Reply:
    """An HTTP answer: the status and the parsed body (None where it was no JSON)."""

    status: int
    body: Any

    def why(self) -> str:
        """Say what the server said, in one line."""
        body = self.body if isinstance(self.body, dict) else {}
        error = body.get("error", body.get("detail", body.get("message")))
        message = error.get("message") if isinstance(error, dict) else error
        return f"HTTP {self.status}" + (f", {message}" if message else "")


class Http:
    """One server's address."""

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self.timeout = timeout

    def get(self, path: str) -> Reply:
        """GET a path."""
        return self._send(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        """POST a JSON body to a path."""
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return self._send(urllib.request.Request(self.url + path, data, headers))

    def _send(self, request: urllib.request.Request) -> Reply:
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return Reply(answer.status, _parsed(answer.read()))
        except urllib.error.HTTPError as error:
            return Reply(error.code, _parsed(error.read()))
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise R3Error(f"{request.full_url}: expected a server, got {reason}") from None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None
