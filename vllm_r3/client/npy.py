"""Turn one field of an answer into an array: npy as base64 or file, bare int32, nested lists.

Nothing here executes what it reads: numpy parses the npy header, object dtypes are refused, and the
data is one view on the decoded bytes. It imports numpy, and pybase64 where that is installed (some
twenty times as fast as the standard library).
"""

from __future__ import annotations

import base64
import io
import math
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_r3.client.files import NO_FILES, RowFiles
from vllm_r3.client.shape import RoutesError

try:
    import pybase64
except ImportError:
    pybase64 = None

MAGIC = b"\x93NUMPY"
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
HEADER_BYTES = 1 << 14  # numpy itself refuses headers of more than 10,000


def decode_segment(value: Any, where: str, files: RowFiles = NO_FILES) -> np.ndarray | None:
    """Decode one field: None, lists, base64, a file, or an array as the offline API gives it.

    Returns:
        None for null, else an array: (rows, L, K), or flat where the sender left out the shape
        (headerless). An empty list gives shape (0, 0, 0).

    Raises:
        RoutesError: the field cannot be such an array; `where` names request and field.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return read_npy(files.read(value, where), where)
    return _from_base64(value, where) if isinstance(value, str) else _from_lists(value, where)


def _from_base64(text: str, where: str) -> np.ndarray:
    """Decode padded standard base64 of an npy blob, or of bare little-endian int32."""
    try:
        if pybase64 is not None:
            data = pybase64.b64decode_as_bytearray(text, validate=True)
        else:
            data = bytearray(base64.b64decode(text, validate=True))
    except ValueError as error:
        raise RoutesError(
            f"{where}: expected padded base64, got {len(text)} characters: {error}"
        ) from None
    if not data:
        return np.zeros((0, 0, 0), np.uint8)
    if data.startswith(MAGIC):
        return read_npy(data, where)
    if len(data) % 4:
        raise RoutesError(
            f"{where}: expected an npy blob or int32 values, got {len(data)} bytes that are neither"
        )
    return np.frombuffer(data, "<i4")


def read_npy(data: bytes | bytearray | mmap.mmap, where: str) -> np.ndarray:
    """Return the array of one npy blob (format 1.0 or 2.0) as a view on `data`."""
    head = io.BytesIO(memoryview(data)[:HEADER_BYTES])
    try:
        shape, fortran, dtype = HEADERS[np.lib.format.read_magic(head)](head)
    except Exception as error:  # damaged bytes make numpy's reader raise anything
        raise RoutesError(
            f"{where}: expected an npy header of format 1.0 or 2.0, got another: {error!r}"
        ) from None
    if dtype.hasobject:
        raise RoutesError(
            f"{where}: expected integers, got a pickled npy (dtype {dtype}), which is never loaded"
        )
    expected, found = math.prod(shape) * dtype.itemsize, len(data) - head.tell()
    if found != expected or min(shape, default=0) < 0:
        raise RoutesError(
            f"{where}: expected {expected} bytes for {tuple(shape)} {dtype}, got {found}"
        )
    flat = np.frombuffer(data, dtype, offset=head.tell()) if found else np.zeros(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _from_lists(value: Any, where: str) -> np.ndarray:
    """Turn nested lists, an array or a CPU tensor into an array; refuse ragged ones."""
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.array([None])
    if array.size == 0:
        return array.reshape(array.shape if array.ndim == 3 else (0, 0, 0)).astype(np.uint8)
    if array.dtype == object:
        raise RoutesError(
            f"{where}: expected lists of equal length [rows][layers][top_k], got ragged ones"
        )
    return array
