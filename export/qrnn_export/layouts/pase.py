"""Layout of PASE+ speech encoders: their QRNN and the convolution of width 1 after it.

    rnn.layers.{l}.linear.weight, .bias     QRNN on the front end's frames; window 2, output gates
    W.weight, W.bias                        [C, H, 1], [C]: a linear head at every timestep

The program fixes zoneout 0. It asks for two directions and gets one twice as wide, which the
shapes show. The convolutions in front, and what is added to or done with the output of W, are not
part of the export: the caller keeps them.
"""

from __future__ import annotations

import re

from qrnn_export.layouts.base import ImportedWeights, Layout, Tensors, refuse_unknown
from qrnn_export.layouts.stack import StackFacts, read_stack
from qrnn_export.layouts.stack_weights import LINEAR
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import CheckpointError
from qrnn_serve.model.config import SequenceModelConfig

_STACK = re.compile(r"^rnn\.(?P<stack>layers|layers_bwd)\.(?P<layer>\d+)\." + LINEAR)
_AROUND = {
    "blocks": "the convolutions in front: feed their output, [B, T, I]",
    "feblock": "the convolution in front: feed its output",
    "tdnn": "the time-delay layers in front: feed their output, [B, T, I]",
    "denseskips": "the skip connections: add their frames to the logits",
    "norm_out": "the normalisation of the output: apply it after the skip connections",
}


def _matches(tensors: Tensors) -> bool:
    return any(_STACK.match(name) for name in tensors) and "W.weight" in tensors


def _read(tensors: Tensors, hints: ImportHints) -> ImportedWeights:
    others = [n for n in tensors if not _STACK.match(n) and n not in ("W.weight", "W.bias")]
    # Other encoders of that program (ASPP_blocks) have a W that they never use.
    refuse_unknown("pase", [name for name in others if name.split(".")[0] not in _AROUND])
    weight = tensors.get("W.weight")
    if weight is None:
        raise CheckpointError("W.weight, the convolution after the QRNN, is missing")
    if weight.dim() != 3 or weight.shape[2] != 1:
        raise CheckpointError(
            f"W.weight: expected a convolution of width 1, [C, H, 1], got {list(weight.shape)}; "
            "SequenceModel has no wider convolution after the QRNN"
        )
    # The program gives every layer window 2.
    facts = StackFacts(output_size=weight.shape[1], window=(2,), output_gate=True, zoneout=0.0)
    stack = read_stack(tensors, _STACK, facts, hints)
    head = {"head.weight": weight.squeeze(2)}
    if "W.bias" in tensors:
        head["head.bias"] = tensors["W.bias"]
    config = SequenceModelConfig(
        qrnn=stack.config, head_size=weight.shape[0], head_bias="head.bias" in head
    )
    parts = dict.fromkeys(name.split(".")[0] for name in others)
    notes = [f"left out: {part}, {_AROUND[part]}" for part in parts]
    notes.append("the convolution W is the linear head at every timestep")
    return ImportedWeights(config, {**stack.tensors, **head}, (*stack.notes, *notes))


PASE = Layout(
    name="pase",
    describes="the QRNN of PASE+ (santi-pdp/pase) and the convolution of width 1 after it",
    matches=_matches,
    read=_read,
)
