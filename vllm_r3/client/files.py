"""Read the files that an answer in encoding `file` names: mapped on this host, else fetched.

The answer gives a name, never a path; where files are read is the caller's to say. It imports the
standard library only.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_r3.client.shape import INTEGER, STRING, RoutesError, take

FILES = "/routed_experts/files"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.npy")


@dataclass(frozen=True)
class RowFiles:
    """Where files of rows are read: first in the directory, then from the server.

    Attributes:
        directory: the server's `--routed-experts-dir`, as this host sees it.
        url: the server's address.
        api_key: the server's, if it asks for one.
        timeout: seconds for one file.
    """

    directory: str | Path | None = None
    url: str | None = None
    api_key: str | None = None
    timeout: float = 600.0

    def read(self, reference: Mapping[str, Any], where: str) -> bytes | mmap.mmap:
        """Return the bytes of a file, held against what the answer says of it.

        A mapped file stays readable when the server removes it, but on a network file system it may
        not: copy rows that are kept for longer than `--routed-experts-file-ttl`.

        Raises:
            RoutesError: the file is gone, or is another than the answer says.
        """
        name = take(reference, "name", STRING, where)
        nbytes = take(reference, "nbytes", INTEGER, where)
        sha256 = take(reference, "sha256", STRING, where)
        if name is None or nbytes is None or sha256 is None or not _NAME.fullmatch(name):
            raise RoutesError(
                f"{where}: expected a plain name, nbytes and sha256 of an npy file, got {reference}"
            )
        data = self._map(name, where)
        data = self._fetch(name, where) if data is None else data
        if len(data) != nbytes:
            raise RoutesError(f"{where}: expected {nbytes} bytes in {name}, got {len(data)}")
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise RoutesError(f"{where}: expected sha256 {sha256} of {name}, got {found}")
        return data

    def _map(self, name: str, where: str) -> bytes | mmap.mmap | None:
        if self.directory is None:
            return None
        try:
            with open(Path(self.directory) / name, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError as error:
            if self.url is None:
                raise RoutesError(
                    f"{where}: expected {name} in {self.directory}, which has none, or no longer; "
                    "read it sooner, or give the server's url"
                ) from error
            return None
        except (OSError, ValueError) as error:
            raise RoutesError(f"{where}: cannot map {self.directory}/{name}: {error}") from error

    def _fetch(self, name: str, where: str) -> bytes:
        from vllm_r3.send import send

        if self.url is None:
            raise RoutesError(
                f"{where}: the rows are in the file {name}: give files=RowFiles(directory=…, url=…)"
            )
        path = f"{self.url.rstrip('/')}{FILES}/{name}"
        try:
            status, data = send("GET", path, timeout=self.timeout, api_key=self.api_key)
        except OSError as error:
            raise RoutesError(f"{where}: expected {path}, got {error}") from error
        if status != 200:
            raise RoutesError(f"{where}: expected {path}, got HTTP {status}: {_reason(data)}")
        return data


def _reason(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode(errors="replace")


NO_FILES = RowFiles()
