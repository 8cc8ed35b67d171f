"""Table files: Parquet and Arrow read piece by piece, and written whole or not at all."""

# pyarrow has no type stubs, so that the strict rules would flag every line.
# pyright: basic

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import pyarrow as pa
import pyarrow.parquet as pq

from qrnn_client._errors import FileError

# Rows are read in pieces of about this size, and written in row groups of it.
PIECE_BYTES = 16 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_MAX_PIECE_ROWS = 65_536
_PARQUET = (".parquet", ".pq")
_ARROW = (".arrow", ".feather", ".ipc")


class TableReader(Protocol):
    """A table on disk.

    Attributes:
        schema: Its columns.
        rows: How many rows it has, or None when only reading it all would tell.
    """

    schema: pa.Schema
    rows: int | None

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these columns in order, in pieces of bounded size."""
        ...


@contextlib.contextmanager
def open_table(path: Path) -> Iterator[TableReader]:
    """Open a Parquet, Arrow or Feather file, told apart by its first bytes.

    Raises:
        FileError: It is not there, of another kind, or damaged; also when that shows while reading.
    """
    with contextlib.ExitStack() as stack:
        with explained(f"cannot read {path}"):
            table = _open(path, stack)
        yield table


class OutputTable:
    """A table file that is written beside its place and moved there by `commit`.

    Leaving the context without a commit removes what was written.

    Args:
        path: Where it goes: .parquet, .arrow or .feather.
        schema: Its columns.
        overwrite: Replace a file that is there.

    Raises:
        FileError: The path cannot be written, exists, or its ending is unknown.
    """

    def __init__(self, path: Path, schema: pa.Schema, *, overwrite: bool) -> None:
        check_output(path, overwrite=overwrite)
        self.schema = schema
        self._path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = 0
        with explained(f"cannot write {path}"):
            # "x" and not "w": never through a link or over a file that another program put there.
            self._file = self._partial.open("xb")
            if path.suffix in _PARQUET:
                self._writer: Any = pq.ParquetWriter(self._file, schema)
            else:
                self._writer = pa.ipc.new_file(self._file, schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError, pa.ArrowException):
                self._writer.close()
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows. They reach the disk in row groups of a useful size."""
        self._held.append(batch)
        self._held_rows += batch.num_rows
        self._held_bytes += batch.nbytes
        if self._held_rows >= _MAX_PIECE_ROWS or self._held_bytes >= PIECE_BYTES:
            self._flush()

    def commit(self) -> None:
        """Put the finished file in its place, in one step."""
        with explained(f"cannot write {self._path}"):
            self._flush()
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self._path)

    def _flush(self) -> None:
        with explained(f"cannot write {self._path}"):
            table = pa.Table.from_batches(self._held, self.schema).combine_chunks()
            if table.num_rows:
                self._writer.write_table(table)
        self._held = []
        self._held_rows = self._held_bytes = 0


def check_output(path: Path, *, overwrite: bool) -> None:
    """Check what can be checked before any row is scored.

    Raises:
        FileError: The path cannot be written, exists, or its ending is unknown.
    """
    if path.suffix not in _PARQUET + _ARROW:
        known = ", ".join(_PARQUET + _ARROW)
        raise FileError(f"cannot write {path}: expected a name that ends in one of {known}")
    if not path.parent.is_dir():
        raise FileError(f"cannot write {path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise FileError(f"cannot write {path}: it exists and is not a file")
    if path.exists() and not overwrite:
        raise FileError(f"cannot write {path}: it exists; --overwrite (overwrite=True) replaces it")


def check_not_input(path: Path, input_path: Path) -> None:
    """Check that the output does not replace the input.

    Raises:
        FileError: It would.
    """
    if path.exists() and path.samefile(input_path):
        raise FileError(f"cannot write {path}: it is the input file")


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn errors of pyarrow and of the system into FileErrors that begin with `what`."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise FileError(f"{what}: {error}") from error


def _open(path: Path, stack: contextlib.ExitStack) -> TableReader:
    if not path.is_file():
        raise FileError(f"cannot read {path}: there is no such file")
    with path.open("rb") as file:
        magic = file.read(6)
    if magic[:4] == b"PAR1":
        # Read page by page: by default a whole row group is in memory, which may be the whole file.
        file = pq.ParquetFile(
            path, pre_buffer=False, buffer_size=_READ_BYTES, page_checksum_verification=True
        )
        return _ParquetReader(path, stack.enter_context(file))
    if magic == b"ARROW1":
        source = stack.enter_context(pa.memory_map(str(path)))
        return _ArrowReader(path, stack.enter_context(pa.ipc.open_file(source)))
    if magic[:4] == b"\xff\xff\xff\xff":
        source = stack.enter_context(pa.memory_map(str(path)))
        return _StreamReader(path, stack.enter_context(pa.ipc.open_stream(source)))
    raise FileError(
        f"cannot read {path}: expected a Parquet, Arrow or Feather (version 2) file, but it begins "
        f"with {magic!r}"
    )


class _ParquetReader:
    def __init__(self, path: Path, file: pq.ParquetFile) -> None:
        self._path = path
        self._file = file
        self.schema: pa.Schema = file.schema_arrow
        self.rows: int | None = file.metadata.num_rows

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with explained(f"cannot read {self._path}"):
            yield from self._file.iter_batches(self._piece_rows(columns), columns=columns)

    def _piece_rows(self, columns: list[str]) -> int:
        metadata = self._file.metadata
        wanted = tuple(f"{column}." for column in columns)
        total_bytes = sum(
            chunk.total_uncompressed_size
            for group in map(metadata.row_group, range(metadata.num_row_groups))
            for chunk in map(group.column, range(group.num_columns))
            if f"{chunk.path_in_schema}.".startswith(wanted)
        )
        rows_that_fit = PIECE_BYTES * metadata.num_rows // max(total_bytes, 1)
        return max(1, min(rows_that_fit, _MAX_PIECE_ROWS))


class _ArrowReader:
    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self.schema: pa.Schema = file.schema
        # Releases of pyarrow before 20 cannot count without reading.
        self.rows: int | None = file.count_rows() if hasattr(file, "count_rows") else None

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with explained(f"cannot read {self._path}"):
            for number in range(self._file.num_record_batches):
                yield self._file.get_batch(number).select(columns)


class _StreamReader:
    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self.schema: pa.Schema = file.schema
        self.rows: int | None = None

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with explained(f"cannot read {self._path}"):
            for batch in self._file:
                yield batch.select(columns)
