"""The README.md of a Triton model repository."""

from __future__ import annotations

from collections.abc import Sequence

from qrnn_export.triton_config import MAX_BATCH_ROWS
from qrnn_serve.core.manifest import Manifest

_IMAGE = "nvcr.io/nvidia/tritonserver:26.04-py3"

_START = """\
# Models for Triton

{names}; written by `qrnn-export --triton`.

Run the server in this folder, and send it a row of two timesteps:

```sh
docker run --rm -p 8000:8000 -p 8001:8001 -p 8002:8002 -v "$PWD:/models" \\
  {image} tritonserver --model-repository=/models
curl localhost:8000/v2/models/{first}/infer -d '{example}'
```

`input` is batch-major, `[rows, timesteps, ...]`. `lengths` is `[rows, 1]`: how many timesteps of
each row are real. What stands after them is not read and changes no score. Answers are `{output}`
and, except in a `_stream` model, `state_out`.
"""

_STREAM = """
`_stream` models keep the state of a row on the server: send a row in chunks, all with the same
`sequence_id` (not 0), the first with `sequence_start`, the last with `sequence_end`. Their
`lengths` are of the chunk.
"""

_NUMBERS = """
In the `_torchscript_stream` model the tensors are called `input__0`, `lengths__1` and
`{output}__0`: its backend finds tensors by these numbers when there is state.
"""

_NO_STREAM = """
There is no model with state on the server: with {reason}, chunks of a row are not scored like
the whole row.
"""

_ONNX = """
`_onnx` models run on CPUs, where they were proven, with the operators in `libqrnn_kernels.so`. The
library was built on the machine of the export. Where it does not load (an older glibc, another
processor), or for a GPU, delete `model_operations` from `config.pbtxt`: the file then runs in
standard operators, with the same scores, slowly. For a GPU change `instance_group` too.
"""

_TORCHSCRIPT = """
`_torchscript` models are in torch's own operators and run on a GPU where there is one, else on
CPUs. They were saved by torch {torch}; a server whose libtorch is much older may not read them.
"""

_LIMITS = """
Triton joins requests to batches of up to {rows} rows (`max_batch_size`) when their `input` has the
same number of timesteps. Pad `input` to few different lengths, for example powers of two, so that
more of them meet: scores stay the same, but padded timesteps are computed. Ragged batches would
need graphs that take rows laid end to end, which these do not; `qrnn-serve` does. One wrong row
(an id out of range, a length beyond `input`) fails the whole batch that it is in, other callers'
rows too.
"""


def readme_text(names: Sequence[str], manifest: Manifest, example: str) -> str:
    """What to run, what to send, and what this cannot do.

    Args:
        names: Of the models.
        manifest: Of one artefact.
        example: Body of a request to the first model.
    """
    parts = [_START]
    if not any(name.endswith("_stream") for name in names):
        parts.append(_NO_STREAM)
    else:
        parts.append(_STREAM)
        parts += [_NUMBERS for name in names if name.endswith("_torchscript_stream")]
    parts += [_ONNX for name in names if name.endswith("_onnx")]
    parts += [_TORCHSCRIPT for name in names if name.endswith("_torchscript")]
    parts.append(_LIMITS)
    backward = manifest.config["qrnn"]["bidirectional"] != "no"
    return "".join(parts).format(
        names=", ".join(f"`{name}`" for name in names),
        first=names[0],
        image=_IMAGE,
        example=example,
        output=manifest.outputs[0].name,
        reason="a backward direction" if backward else f"{manifest.config['pooling']} pooling",
        torch=manifest.versions.get("torch", "of an unknown version"),
        rows=MAX_BATCH_ROWS,
    )
