"""Layout of bare state dicts of salesforce/pytorch-qrnn, and of fastai's QRNN class.

    layers.{l}.linear.weight       [G*H, W*I]   rows Z, F(, O); columns current input, then previous
    layers.{l}.linear.bias         [G*H]
    layers_bwd.{l}.linear.*        the backward direction (fastai only)
    linear.weight, linear.bias     a single QRNNLayer

f multiplies the new value, which is our orientation, so tensors are taken as they are.
"""

from __future__ import annotations

import re

from qrnn_export.layouts.base import ImportedWeights, Layout, Tensors, refuse_unknown
from qrnn_export.layouts.stack import StackFacts, read_stack
from qrnn_export.layouts.stack_weights import LINEAR
from qrnn_export.options import ImportHints
from qrnn_serve.model.config import SequenceModelConfig

BARE_STACK = re.compile(r"^(?:(?P<stack>layers|layers_bwd)\.(?P<layer>\d+)\.)?" + LINEAR)


def _matches(tensors: Tensors) -> bool:
    return bool(tensors) and all(BARE_STACK.match(name) for name in tensors)


def _read(tensors: Tensors, hints: ImportHints) -> ImportedWeights:
    refuse_unknown("salesforce", [name for name in tensors if not BARE_STACK.match(name)])
    stack = read_stack(tensors, BARE_STACK, StackFacts(), hints)
    note = "f multiplies the new value (salesforce orientation), by the layout"
    return ImportedWeights(
        SequenceModelConfig(qrnn=stack.config), stack.tensors, (note, *stack.notes)
    )


SALESFORCE = Layout(
    name="salesforce",
    describes="bare state dicts of salesforce/pytorch-qrnn (QRNN, QRNNLayer) and fastai's QRNN",
    matches=_matches,
    read=_read,
)
