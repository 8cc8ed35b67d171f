"""ONNX models around a single ai.qrnn::FoPool node, and batches for them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from qrnn_export.onnx_pool import (
    DOMAIN,
    DOMAIN_VERSION,
    IR_VERSION,
    OPSET_VERSION,
    POOL_OP,
    pool_function,
)

H = 5
"""Channels."""

FO_POOL = {"output_gate": 1, "reverse": 0, "zoneout": 0.0}
"""Attributes of fo-pooling forward."""
F_POOL_REVERSE = {"output_gate": 0, "reverse": 1, "zoneout": 0.25}
"""Attributes of f-pooling from the end to the start."""


def pool_model(settings, dtype=np.float32, *, fixed_shapes=True) -> onnx.ModelProto:
    """A model that is nothing but the operator, with its body.

    Without fixed shapes the model takes tensors of any rank: the operator itself must check.
    """
    names = ["gates", "lengths", "c0"]
    node = helper.make_node(POOL_OP, names, ["h", "c"], domain=DOMAIN, **settings)
    width = (3 if settings["output_gate"] else 2) * H
    shapes = {
        "gates": ("batch", "time", width),
        "lengths": ("batch",),
        "c0": ("batch", H),
        "h": ("batch", "time", H),
        "c": ("batch", H),
    }
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = {
        name: helper.make_tensor_value_info(
            name,
            onnx.TensorProto.INT64 if name == "lengths" else element,
            list(shape) if fixed_shapes else None,
        )
        for name, shape in shapes.items()
    }
    return _model([node], [values[n] for n in names], [values[n] for n in ("h", "c")])


def cast_pool_model(settings, element: int) -> onnx.ModelProto:
    """float32 in and out, the operator between in another type."""
    inner = {"gates": "gates_cast", "c0": "c0_cast"}
    nodes = [helper.make_node("Cast", [k], [v], to=element) for k, v in inner.items()]
    nodes.append(
        helper.make_node(
            POOL_OP,
            ["gates_cast", "lengths", "c0_cast"],
            ["h_cast", "c_cast"],
            domain=DOMAIN,
            **settings,
        )
    )
    float32 = onnx.TensorProto.FLOAT
    nodes += [helper.make_node("Cast", [f"{n}_cast"], [n], to=float32) for n in ("h", "c")]
    width = (3 if settings["output_gate"] else 2) * H
    inputs = [
        helper.make_tensor_value_info("gates", float32, ["batch", "time", width]),
        helper.make_tensor_value_info("lengths", onnx.TensorProto.INT64, ["batch"]),
        helper.make_tensor_value_info("c0", float32, ["batch", H]),
    ]
    outputs = [
        helper.make_tensor_value_info("h", float32, ["batch", "time", H]),
        helper.make_tensor_value_info("c", float32, ["batch", H]),
    ]
    return _model(nodes, inputs, outputs)


def pool_feed(lengths, timesteps, dtype=np.float32, gates=3):
    """Gates [B, T, G*H] with NaN in the padding, lengths [B] and a state [B, H]."""
    random = np.random.default_rng([timesteps, *lengths])
    rows = len(lengths)
    values = random.standard_normal((rows, timesteps, gates * H)).astype(dtype)
    counts = np.array(lengths, np.int64)
    values[np.arange(timesteps) >= counts[:, None]] = np.nan
    state = random.standard_normal((rows, H)).astype(dtype)
    return {"gates": values, "lengths": counts, "c0": state}


def _model(nodes, inputs, outputs) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", OPSET_VERSION), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(
        helper.make_graph(nodes, "pool", inputs, outputs),
        functions=[pool_function()],
        opset_imports=opsets,
        ir_version=IR_VERSION,
    )
