"""Write one stream of bytes as files of a chosen size, with the sha256 of each.

    name                     without a size
    name.000, name.001, …    of `size` bytes each, the last one shorter

`cat name.*` gives the stream back. Knows nothing of what is in it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

MOST = 1000  # three digits keep the parts in order for a shell's *


class PartWriter:
    """A file to write to; `sums` holds sha256 by file name once it is closed.

    Args:
        folder: where the files go.
        name: the name of the whole.
        size: bytes a part, 0 for one file.
    """

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self.folder, self.name, self.size = folder, name, size
        self.sums: dict[str, str] = {}
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._left = 0

    def write(self, data: bytes) -> int:
        """Write all of `data`, over as many parts as it takes."""
        view = memoryview(data)
        while view:
            if self._file is None:
                self._open()
            assert self._file is not None
            piece = view[: self._left] if self.size else view
            self._file.write(piece)
            self._digest.update(piece)
            self._left -= len(piece)
            view = view[len(piece) :]
            if self.size and not self._left:
                self.close()
        return len(data)

    def close(self) -> None:
        """Finish the part that is open."""
        if self._file is not None:
            self._file.close()
            self.sums[Path(self._file.name).name] = self._digest.hexdigest()
            self._file = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> None:
        number = len(self.sums)
        if number == MOST:
            raise OSError(f"{self.name}: more than {MOST} parts of {self.size} bytes")
        name = f"{self.name}.{number:03d}" if self.size else self.name
        self._file = (self.folder / name).open("xb")
        self._digest = hashlib.sha256()
        self._left = self.size
