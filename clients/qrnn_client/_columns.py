"""Which columns of a table hold ids and sequences, and which columns the output has."""

# pyarrow has no type stubs, so that the strict rules would flag every line.
# pyright: basic

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from qrnn_client._arrow import score_type, unfit_reason
from qrnn_client._errors import FileError
from qrnn_client._models import ModelInfo

SCORE_COLUMN = "score"
ERROR_COLUMN = "error"
_DEFAULT_INPUT_COLUMN = "features"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The columns that the caller named; `input_column` None asks for the one that fits."""

    path: Path
    id_column: str
    input_column: str | None


def choose_column(schema: pa.Schema, info: ModelInfo, wanted: Wanted) -> str:
    """Return the name of the column with the sequences, after a look at the ids too.

    Raises:
        FileError: There is none that fits the model, or several; or the ids are missing.
    """
    path = wanted.path
    for name in (wanted.id_column, wanted.input_column):
        if name is not None and len(schema.get_all_field_indices(name)) != 1:
            count = "several columns" if name in schema.names else "no column"
            raise FileError(f"{path}: {count} {name!r}; it has {', '.join(schema.names)}")
    if wanted.id_column in (SCORE_COLUMN, ERROR_COLUMN):
        raise FileError(
            f"{path}: the id column cannot be called {wanted.id_column!r}, as an output column is"
        )
    reasons = {column.name: unfit_reason(column.type, info) for column in schema}
    name = wanted.input_column
    if name is None and _DEFAULT_INPUT_COLUMN in schema.names:
        name = _DEFAULT_INPUT_COLUMN
    if name is not None:
        if reasons[name]:
            raise FileError(_unfit_column(path, name, reasons[name], info))
        return name
    fitting = [column for column, reason in reasons.items() if reason is None]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise FileError(f"{path}: name the column with the sequences (--column), one of {fitting}")
    types = ", ".join(f"{column.name} is {column.type}" for column in schema)
    raise FileError(f"{path}: no column holds {info.expects} of model {info.name!r}: {types}")


def _unfit_column(path: Path, name: str, reason: str | None, info: ModelInfo) -> str:
    return f"{path}: column {name!r} cannot hold {info.expects} of model {info.name!r}: {reason}"


def output_schema(id_field: pa.Field, info: ModelInfo) -> pa.Schema:
    """Return the columns of the output, with the model's identity as the file's metadata."""
    id_type = id_field.type
    if pa.types.is_dictionary(id_type):
        id_type = id_type.value_type
    facts = {
        "qrnn.model": info.name,
        "qrnn.version": info.version,
        "qrnn.weights_sha256": info.weights_sha256,
        "qrnn.output_name": info.output_name,
    }
    return pa.schema(
        [
            pa.field(id_field.name, id_type, id_field.nullable),
            pa.field(SCORE_COLUMN, score_type(info)),
            pa.field(ERROR_COLUMN, pa.string()),
        ],
        metadata=facts,
    )
