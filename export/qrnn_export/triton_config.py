"""Configurations of Triton models: config.pbtxt, the text form of Triton's ModelConfig message.

What Triton's backends ask for, and why the names differ:

- Triton puts requests into one batch when their tensors have the same shape beside the batch axis,
  so rows of one request may have any `lengths`, and rows of several share their padded length.
- A row's length is a scalar, which Triton does not have beside a batch axis: it is [1] in a
  request, reshaped to nothing.
- The onnxruntime backend takes no optional input where it batches; the pytorch backend takes none
  at all. So a model either has no state, or always has one, which Triton keeps for each sequence.
- With state, the pytorch backend finds tensors by the number at the end of their name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qrnn_serve.core.manifest import Manifest, TensorSpec

MAX_BATCH_ROWS = 64
"""Rows of all requests in one batch."""

_MAX_SEQUENCES = 1024
_PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "pytorch": "pytorch_libtorch"}
_DTYPES = {"float32": "TYPE_FP32", "float64": "TYPE_FP64", "int64": "TYPE_INT64"}


class _Name(str):
    """A value that stands without quotation marks."""

    __slots__ = ()


def config_text(
    name: str, backend: str, manifest: Manifest, *, stream: bool, library: str | None
) -> str:
    """The text of config.pbtxt.

    Args:
        name: Of the model, and of its folder.
        backend: "onnxruntime" or "pytorch".
        manifest: Of the artefact: names, dtypes and shapes.
        stream: Let Triton carry the state from request to request of a sequence.
        library: Operators to register, as the path that the server will see; None for none.
    """
    numbered = stream and backend == "pytorch"
    specs = (*manifest.inputs, *manifest.outputs)
    places = (*range(len(manifest.inputs)), *range(len(manifest.outputs)))
    names = {
        s.name: f"{s.name}__{n}" if numbered else s.name for s, n in zip(specs, places, strict=True)
    }
    inputs = [s for s in manifest.inputs if s.name != "state"]
    outputs = [s for s in manifest.outputs if not (stream and s.name == "state_out")]
    config: dict[str, Any] = {
        "name": name,
        "platform": _PLATFORMS[backend],
        "backend": backend,
        "max_batch_size": MAX_BATCH_ROWS,
        "input": [_tensor(names[s.name], s) for s in inputs],
        "output": [_tensor(names[s.name], s) for s in outputs],
    }
    if stream:
        config["sequence_batching"] = _carried_state(names, manifest)
    else:
        config["dynamic_batching"] = {}
    if backend == "onnxruntime":
        # The operators in the library run on the CPU.
        config["instance_group"] = [{"kind": _Name("KIND_CPU")}]
    if library is not None:
        config["model_operations"] = {"op_library_filename": [library]}
    return "\n".join(_lines(config)) + "\n"


def _tensor(name: str, spec: TensorSpec) -> dict[str, Any]:
    dims = [size if isinstance(size, int) else -1 for size in spec.shape[1:]]
    entry = {"name": name, "data_type": _Name(_DTYPES[spec.dtype]), "dims": dims or [1]}
    return entry if dims else {**entry, "reshape": {"shape": []}}


def _carried_state(names: Mapping[str, str], manifest: Manifest) -> dict[str, Any]:
    spec = next(s for s in manifest.inputs if s.name == "state")
    kind = {"data_type": _Name(_DTYPES[spec.dtype]), "dims": [manifest.state_size]}
    state = {
        "input_name": names["state"],
        "output_name": names["state_out"],
        **kind,
        "initial_state": [{**kind, "zero_data": True, "name": "zeros"}],
    }
    return {"oldest": {"max_candidate_sequences": _MAX_SEQUENCES}, "state": [state]}


def _lines(message: Mapping[str, Any]) -> Iterable[str]:
    for field, value in message.items():
        if isinstance(value, list) and (not value or isinstance(value[0], int)):
            yield f"{field}: [ {', '.join(map(str, value))} ]"
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield f"{field} {{"
                yield from (f"  {line}" for line in _lines(item))
                yield "}"
            else:
                yield f"{field}: {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not isinstance(value, _Name):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)
