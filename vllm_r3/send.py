"""The one HTTP client: one request over the standard library."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def send(
    method: str,
    url: str,
    body: Any = None,
    timeout: float = 600.0,
    api_key: str | None = None,
) -> tuple[int, bytes]:
    """Send one request, a JSON body if given; return the status and the raw answer.

    Raises:
        OSError: no connection; also when the server closed it without an answer.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        near = urllib.parse.urlsplit(url).hostname in LOOPBACK  # a proxy could not reach it
        opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * near)
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            answer = opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read()
    except (http.client.HTTPException, ValueError) as error:
        raise ConnectionError(f"no answer from {url}: {error!r}") from error
