"""Searches everything below a directory for some bytes: files as they are, and what Parquet has compressed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def traces(root: Path, marker: bytes) -> list[str]:
    """The files below ``root`` that hold ``marker``."""
    assert root.is_dir()
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return [str(path.relative_to(root)) for path in files if marker in path.read_bytes() or marker in _unpacked(path)]


def _unpacked(path: Path) -> bytes:
    if path.suffix != ".parquet":
        return b""
    with pq.ParquetFile(path) as file:
        table = file.read()
    return b"".join(_bytes(column) for column in table.columns)


def _bytes(column: pa.ChunkedArray) -> bytes:
    """The values of a column, those of structs and lists as their text."""
    values = column.to_pylist()
    return b"\0".join(one if isinstance(one, bytes) else str(one).encode("utf-8", "surrogatepass") for one in values)
