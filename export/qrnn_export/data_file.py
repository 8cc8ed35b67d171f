"""Rows of a user's Parquet file as batches to compare an artefact on."""

# pyarrow has no type stubs, so that the strict rules would flag every line.
# pyright: basic

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qrnn_export.cases import Array, Case
from qrnn_serve.core.errors import InputError
from qrnn_serve.model.sequence_model import SequenceModel

MOST_ROWS = 256
_BATCH_ROWS = 32


def read_batches(path: Path, column: str, model: SequenceModel) -> Iterator[Case]:
    """The first MOST_ROWS rows of a column, as padded batches without answers.

    Args:
        path: A Parquet file.
        column: A list column: lists of token ids, or lists of lists of features, of any length.
        model: What the rows must fit.

    Raises:
        InputError: The file or the column cannot be read, or a row does not fit the model.
    """
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: expected a Parquet file: {error}") from error
    with file:
        if column not in file.schema_arrow.names:
            raise InputError(f"{path}: has no column {column!r}, only {file.schema_arrow.names}")
        first = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column]):
            values = batch.column(0).slice(0, MOST_ROWS - first).to_pylist()
            rows = [_row(r, f"{path}, row {first + i}", model) for i, r in enumerate(values)]
            if rows:
                yield _padded(rows, f"rows {first} to {first + len(rows) - 1}")
            first += len(rows)
            if first == MOST_ROWS:
                return
    if first == 0:
        raise InputError(f"{path}: has no rows")


def _row(value: object, place: str, model: SequenceModel) -> Array:
    config = model.config
    dtype = np.int64 if config.takes_ids else _dtype_of(model)
    kind = "ids" if config.takes_ids else "numbers"
    expected = " ".join(["lists of", *map(str, config.timestep_shape), kind])
    try:
        row = np.array(value, dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"{place}: expected {expected}: {error}") from error
    if row.shape[1:] != config.timestep_shape or len(row) == 0:
        raise InputError(f"{place}: expected {expected}, at least one, got shape {list(row.shape)}")
    if config.takes_ids and not (row.min() >= 0 and row.max() < (config.vocabulary_size or 0)):
        raise InputError(f"{place}: expected ids from 0 to {(config.vocabulary_size or 0) - 1}")
    if not np.isfinite(row).all():
        raise InputError(f"{place}: holds NaN or infinity")
    return row


def _padded(rows: Sequence[Array], name: str) -> Case:
    lengths = np.array([len(row) for row in rows], np.int64)
    values = np.zeros((len(rows), lengths.max(), *rows[0].shape[1:]), rows[0].dtype)
    for b, row in enumerate(rows):
        values[b, : len(row)] = row
    nothing = np.empty(0, rows[0].dtype)
    return Case(name, values, lengths, None, nothing, nothing)


def _dtype_of(model: SequenceModel) -> np.dtype:
    return np.dtype(str(model.edge_dtype()).removeprefix("torch."))
