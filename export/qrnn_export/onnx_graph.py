"""Builds an ONNX graph node by node, and remembers the shape of every tensor in it.

Knows nothing of QRNNs. Names are given by the caller and nothing depends on memory addresses or on
iteration over sets, so equal calls give equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

Shape = tuple[int | str, ...]

_ALWAYS_INSIDE_BYTES = 1024
"""Tensors up to this size stay in the model: shape inference reads them."""

_PAGE_BYTES = 4096
"""Where tensors beside the model begin, so that runtimes can map them."""

_BLOCK_BYTES = 16 << 20
"""How much of a large tensor is copied at a time."""

_TILE_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class Batch:
    """Names of the tensors that say which timesteps are real.

    Attributes:
        rows: [1] int64, B.
        timesteps: [1] int64, T.
        lengths: [B] int64, checked to lie in 0 to T.
        real: [B, T, 1] bool, False at padded timesteps.
    """

    rows: str
    timesteps: str
    lengths: str
    real: str


class GraphBuilder:
    """Collects nodes, weights and the types of all tensors.

    Everything goes straight into `graph`, or `beside` it: a protobuf message that is put into
    another is copied, and weights may be large.

    Args:
        graph: Empty graph to fill.
        dtype: numpy dtype of features, weights and outputs.
        beside: File for large tensors, in the folder of the model's; None keeps them in the graph.
    """

    def __init__(
        self, graph: onnx.GraphProto, dtype: npt.DTypeLike, beside: BinaryIO | None = None
    ) -> None:
        self.graph = graph
        self.dtype = np.dtype(dtype)
        self._beside = beside
        self._constants: set[str] = set()
        self._values: dict[str, onnx.ValueInfoProto] = {}

    def input(self, name: str, shape: Shape, dtype: npt.DTypeLike | None = None) -> str:
        """Declare a graph input."""
        self.graph.input.append(_value_info(name, dtype or self.dtype, shape))
        return name

    def output(self, name: str, dtype: npt.DTypeLike | None = None) -> None:
        """Make the tensor `name`, which the last node to give it made, a graph output.

        Args:
            name: Its name, and the output's.
            dtype: Of the output; None for the graph's own.
        """
        value = self._values.pop(name)
        if dtype is not None and np.dtype(dtype) != self.dtype:
            inside = f"{name}.inside"
            (node,) = (n for n in self.graph.node if name in n.output)
            node.output[list(node.output).index(name)] = inside
            self._values[inside] = onnx.ValueInfoProto()
            self._values[inside].CopyFrom(value)
            self._values[inside].name = inside
            target = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            self.graph.node.append(
                helper.make_node("Cast", [inside], [name], f"{name}.edge", to=target)
            )
            value.type.tensor_type.elem_type = target
        self.graph.output.append(value)

    def own_dtype(self, name: str, shape: Shape, dtype: npt.DTypeLike) -> str:
        """The tensor `name` of `dtype` in the graph's own dtype."""
        if np.dtype(dtype) == self.dtype:
            return name
        target = int(helper.np_dtype_to_tensor_dtype(self.dtype))
        return self.node("Cast", [name], f"{name}.inside", shape, to=target)

    def weight(self, name: str, values: npt.NDArray[Any]) -> str:
        """Add a constant tensor; under the name of an input, its value when it is left out."""
        tensor = self.graph.initializer.add()
        tensor.name = name
        tensor.data_type = helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor.dims.extend(values.shape)
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
        if self._beside is None or values.nbytes <= _ALWAYS_INSIDE_BYTES:
            tensor.raw_data = values.tobytes()
        else:
            _write_beside(tensor, values, self._beside)
        self._constants.add(name)
        return name

    def matrix(self, name: str, weights: Mapping[str, npt.NDArray[Any]], key: str) -> str:
        """The weight of a matrix product from the right, in the graph's dtype.

        Args:
            name: Of the constant; one in int8 is multiplied with its scales.
            weights: Tensors by name.
            key: Start of the names of the product's tensors, for example "head.".
        """
        values = weights[key + "weight"].T
        constant = self.weight(f"{name}.weight", values)
        if values.dtype != np.int8:
            return constant
        # Not DequantizeLinear: ONNX Runtime takes it before a MatMul as leave to round the other
        # factor to 8 bits too, which is off by half a percent.
        target = int(helper.np_dtype_to_tensor_dtype(self.dtype))
        whole = self.node("Cast", [constant], f"{name}.weight_whole", values.shape, to=target)
        scale = self.weight(f"{name}.scale", weights[key + "scale"])
        return self.node("Mul", [whole, scale], f"{name}.weight_float", values.shape)

    def integers(self, *values: int) -> str:
        """The constant vector `values` as int64, added once however often it is used."""
        name = "integers_" + "_".join(str(v) for v in values)
        return name if name in self._constants else self.weight(name, np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """The constant scalar `value` as int64."""
        name = f"integer_{value}"
        return name if name in self._constants else self.weight(name, np.array(value, np.int64))

    def number(self, value: float) -> str:
        """The constant scalar `value` in the graph's own dtype."""
        name = f"number_{value:g}"
        return name if name in self._constants else self.weight(name, np.array(value, self.dtype))

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        output: str,
        shape: Shape,
        dtype: npt.DTypeLike | None = None,
        **attributes: Any,
    ) -> str:
        """Add an operator with one output; it is named like its output."""
        return self.node_of_many(op, inputs, {output: shape}, dtype, name=output, **attributes)[0]

    def node_of_many(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: dict[str, Shape],
        dtype: npt.DTypeLike | None = None,
        **attributes: Any,
    ) -> list[str]:
        """Add an operator with several outputs of one dtype.

        Args:
            op: Operator type.
            inputs: Names of its inputs.
            outputs: Name and shape of each output.
            dtype: Of the outputs; None for the graph's own.
            **attributes: Attributes of the node, and `name` and `domain`.
        """
        self.graph.node.append(helper.make_node(op, list(inputs), list(outputs), **attributes))
        for name, shape in outputs.items():
            self._values[name] = _value_info(name, dtype or self.dtype, shape)
        return list(outputs)

    def finish(self) -> None:
        """Write down the types of all tensors between inputs and outputs."""
        self.graph.value_info.extend(self._values.values())


def _write_beside(tensor: onnx.TensorProto, values: npt.NDArray[Any], file: BinaryIO) -> None:
    """Append the values to the file, and point the tensor to them."""
    offset = -(-file.tell() // _PAGE_BYTES) * _PAGE_BYTES
    file.seek(offset)
    rows = max(1, _BLOCK_BYTES // (values.nbytes // len(values)))
    blocks = (values[start : start + rows] for start in range(0, len(values), rows))
    file.writelines(_row_major(block).data for block in blocks)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    place = {"location": Path(file.name).name, "offset": offset, "length": values.nbytes}
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))


def _row_major(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A contiguous copy, some columns at a time: of a transposed matrix, as many as caches hold."""
    copy = np.empty(values.shape, values.dtype)
    for start in range(0, values.shape[-1], _TILE_COLUMNS):
        tile = (..., slice(start, start + _TILE_COLUMNS))
        copy[tile] = values[tile]
    return copy


def _value_info(name: str, dtype: npt.DTypeLike, shape: Shape) -> onnx.ValueInfoProto:
    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, element_type, list(shape))
