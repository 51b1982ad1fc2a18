"""Turn one field of an answer into an array: base64 npy, headerless base64 int32, or nested lists.

Nothing here executes what it reads: npy headers are parsed with a size limit, object dtypes are
refused, and the data is one view on the decoded bytes. It imports numpy, and pybase64 where that is
installed (some twenty times as fast).
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from vllm_r3.client import base64_numpy
from vllm_r3.client.shape import RoutesError

try:
    import pybase64
except ImportError:  # numpy does, more slowly
    pybase64 = None

MAGIC = b"\x93NUMPY"
MAX_HEADER = 4096
MAX_BYTES = 1 << 34


def decode_segment(value: Any, where: str) -> np.ndarray | None:
    """Decode one field.

    Args:
        value: None, nested lists, a base64 string, or an array (as the offline API gives it).
        where: names the request and the field in errors.

    Returns:
        None for null, else an integer array: (rows, L, K), or flat where the sender left out the
        shape (headerless). An empty list gives shape (0, 0, 0).

    Raises:
        RoutesError: the field cannot be such an array.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return decode_base64(value, where)
    return decode_nested(value, where)


def decode_base64(text: str, where: str) -> np.ndarray:
    """Decode base64 of an npy blob, or of bare little-endian int32, into a view on its bytes."""
    data = base64_bytes(text, where)
    if len(data) == 0:
        return np.zeros((0, 0, 0), np.uint8)
    if bytes(data[: len(MAGIC)]) == MAGIC:
        return npy_view(data, where)
    if len(data) % 4:
        raise RoutesError(
            f"{where}: expected an npy blob or int32 values, got {len(data)} bytes that are neither"
        )
    return np.frombuffer(data, "<i4")


def base64_bytes(text: str, where: str) -> bytearray | np.ndarray:
    """Decode strict base64 (standard alphabet, padded) into writable bytes."""
    if len(text) > MAX_BYTES:
        raise RoutesError(
            f"{where}: expected at most {MAX_BYTES} characters of base64, got {len(text)}"
        )
    try:
        if pybase64 is not None:
            return pybase64.b64decode_as_bytearray(text, validate=True)
        return base64_numpy.decode(text)
    except ValueError as error:
        raise RoutesError(
            f"{where}: expected padded base64, got {len(text)} characters: {error}"
        ) from None


def npy_view(data: bytearray | np.ndarray, where: str) -> np.ndarray:
    """Return the array of one npy blob (format 1.0 or 2.0) as a view on `data`."""
    shape, fortran, dtype, offset = _npy_header(data, where)
    if dtype.hasobject:
        raise RoutesError(
            f"{where}: expected integers, got a pickled npy (dtype {dtype}), which is never loaded"
        )
    count = 1
    for side in shape:
        count *= int(side)
    if len(data) - offset != count * dtype.itemsize:
        raise RoutesError(
            f"{where}: expected {count * dtype.itemsize} bytes for {tuple(shape)} {dtype}, "
            f"got {len(data) - offset}"
        )
    flat = np.frombuffer(data, dtype, count, offset) if count else np.zeros(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _npy_header(
    data: bytearray | np.ndarray, where: str
) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    major = int(data[6]) if len(data) > 6 else 0
    width = {1: 2, 2: 4}.get(major)
    if width is None or len(data) < 8 + width:
        raise RoutesError(f"{where}: expected npy format 1.0 or 2.0, got {bytes(data[:8])!r}")
    size = int.from_bytes(bytes(data[8 : 8 + width]), "little")
    if size > MAX_HEADER:
        raise RoutesError(
            f"{where}: expected an npy header of at most {MAX_HEADER} bytes, got {size}"
        )
    end = 8 + width + size
    reader = (
        np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    )
    try:
        shape, fortran, dtype = reader(io.BytesIO(bytes(data[8:end])), max_header_size=MAX_HEADER)
    except (ValueError, TypeError, SyntaxError) as error:
        raise RoutesError(
            f"{where}: expected an npy header, got an unreadable one: {error}"
        ) from None
    if any(side < 0 for side in shape):
        raise RoutesError(f"{where}: expected sides of 0 or more, got {shape}")
    return shape, fortran, dtype, end


def decode_nested(value: Any, where: str) -> np.ndarray:
    """Turn nested lists, an array or a CPU tensor into an array; refuse ragged ones."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise RoutesError(
            f"{where}: expected lists of equal length [rows][layers][top_k], got ragged ones"
        ) from None
    if array.size == 0:
        return array.reshape(array.shape if array.ndim == 3 else (0, 0, 0)).astype(np.uint8)
    if array.dtype == object:
        raise RoutesError(
            f"{where}: expected lists of equal length [rows][layers][top_k], got ragged ones"
        )
    return array
