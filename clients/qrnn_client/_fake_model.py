"""The models of the fake server: scores from a function of one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from qrnn_client._dtypes import dtype_of_name, dtype_of_wire, wire_of_dtype
from qrnn_protos.v1 import prediction_pb2 as pb

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """A model of the fake server.

    Attributes:
        score: From one row, [T, input_size] or [T], to its output: [output_size], or
            [T, output_size]. A ValueError that it raises becomes the row's error.
        name: Its name.
        version: Its version.
        input_size: Features, or ids, per timestep; 0 for a model of token ids, one a timestep.
        vocabulary_size: For a model of token ids.
        output_size: Width of an output.
        output_per_timestep: One output a timestep, not one a row.
        state_size: Width of the carried state. The state after a row is the state before it plus
            the number of its timesteps, in each place.
        dtype: numpy name of features, outputs and state.
    """

    score: Callable[[Array], npt.ArrayLike]
    name: str = "model"
    version: str = "1"
    input_size: int = 0
    vocabulary_size: int = 0
    output_size: int = 1
    output_per_timestep: bool = False
    state_size: int = 1
    dtype: str = "float32"

    @property
    def takes_ids(self) -> bool:
        """True for a model of token ids."""
        return self.input_size == 0 or self.vocabulary_size > 0

    def info(self) -> pb.ModelInfo:
        """Return what ListModels says of it."""
        return pb.ModelInfo(
            name=self.name,
            version=self.version,
            takes_ids=self.takes_ids,
            input_size=self.input_size,
            vocabulary_size=self.vocabulary_size,
            output_name="output",
            output_size=self.output_size,
            output_per_timestep=self.output_per_timestep,
            state_size=self.state_size,
            engine="fake",
            devices=["cpu"],
            weights_sha256=f"sha256 of {self.name} {self.version}",
            dtype=wire_of_dtype(dtype_of_name(self.dtype)),
        )


def fake_reply(model: FakeModel, request: pb.PredictRequest) -> pb.PredictResponse:
    """Return the answer: an error for each row that the model refuses, scores of the others."""
    rows = _rows_of(request)
    scored: list[int] = []
    outputs: list[Array] = []
    errors: list[pb.RowError] = []
    for index, row in enumerate(rows):
        try:
            outputs.append(_score_row(model, row))
            scored.append(index)
        except ValueError as error:
            errors.append(_invalid(index, row, error))
    dtype = wire_dtype = dtype_of_name(model.dtype)
    if request.output_dtype:
        wire_dtype = dtype_of_wire(request.output_dtype)
    response = pb.PredictResponse(
        model=model.name,
        version=model.version,
        rows=_tensor(np.array(scored, np.int64)),
        output=_tensor(
            np.concatenate([*outputs, np.zeros((0, model.output_size), dtype)]).astype(wire_dtype)
        ),
        errors=errors,
        timing=pb.Timing(batch_rows=len(rows), batch_timesteps=sum(map(len, rows))),
        request_id=request.request_id,
        device="cpu",
        engine="fake",
    )
    lengths = np.array([len(rows[index]) for index in scored], np.int64)
    if model.output_per_timestep:
        response.output_lengths.CopyFrom(_tensor(lengths))
    if request.return_state:
        before = np.zeros((len(rows), model.state_size), dtype)
        if request.HasField("state"):
            before = array_of(request.state)
        after = before[scored] + lengths[:, None]
        response.state.CopyFrom(_tensor(after.astype(dtype)))
    return response


def _rows_of(request: pb.PredictRequest) -> list[Array]:
    ends = np.cumsum(array_of(request.lengths)).tolist()
    return np.split(array_of(request.values), ends[:-1]) if ends else []


def _score_row(model: FakeModel, row: Array) -> Array:
    if row.dtype.kind != "i" and not np.isfinite(row).all():
        raise ValueError("expected finite numbers")
    output = np.asarray(model.score(row)).astype(dtype_of_name(model.dtype))
    return output.reshape(len(row) if model.output_per_timestep else 1, model.output_size)


def _invalid(index: int, row: Array, error: ValueError) -> pb.RowError:
    return pb.RowError(
        row=index,
        code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
        message=f"values: {error}",
        field="values",
        expected=str(error),
        got=f"{row.dtype} {list(row.shape)}",
        timestep=-1,
    )


def array_of(tensor: pb.Tensor) -> Array:
    """Return a view of a tensor."""
    return np.frombuffer(tensor.data, dtype_of_wire(tensor.dtype)).reshape(tuple(tensor.shape))


def _tensor(array: Array) -> pb.Tensor:
    return pb.Tensor(dtype=wire_of_dtype(array.dtype), shape=array.shape, data=array.tobytes())
