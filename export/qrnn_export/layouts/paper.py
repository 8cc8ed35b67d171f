"""Layout of stacks with the paper's orientation: f multiplies the old state.

Names and rows as in the salesforce layout. The paper has c_t = f * c_{t-1} + (1 - f) * z_t, ours
is c_t = f * z_t + (1 - f) * c_{t-1}; since 1 - sigmoid(F) = sigmoid(-F), changing the sign of the
rows F of weight and bias turns one into the other, and changing a sign loses nothing.

Zoneout as the paper defines it is dropout on 1 - f without rescaling, and does nothing when
evaluating. A file never shows its orientation, so this layout is only taken when it is named.
"""

from __future__ import annotations

from torch import Tensor

from qrnn_export.layouts.base import ImportedWeights, Layout, Tensors, refuse_unknown
from qrnn_export.layouts.salesforce import BARE_STACK
from qrnn_export.layouts.stack import StackFacts, read_stack
from qrnn_export.layouts.unsupported import refuse_3d_gates
from qrnn_export.options import ImportHints
from qrnn_serve.model.config import SequenceModelConfig


def _read(tensors: Tensors, hints: ImportHints) -> ImportedWeights:
    refuse_3d_gates(tensors)
    refuse_unknown("paper", [name for name in tensors if not BARE_STACK.match(name)])
    stack = read_stack(tensors, BARE_STACK, StackFacts(zoneout_rule="fastai"), hints)
    turned = {
        name: _with_turned_gate(tensor, stack.config.layers[int(name.split(".")[2])].hidden_size)
        for name, tensor in stack.tensors.items()
    }
    note = "f multiplies the old state (the paper's orientation), by the layout: the rows F of "
    note += "each weight and bias have changed their sign"
    return ImportedWeights(SequenceModelConfig(qrnn=stack.config), turned, (note, *stack.notes))


def _with_turned_gate(tensor: Tensor, hidden_size: int) -> Tensor:
    turned = tensor.clone()
    turned[hidden_size : 2 * hidden_size].neg_()
    return turned


PAPER = Layout(
    name="paper",
    describes="bare stacks in which f multiplies the old state; only when named",
    matches=lambda tensors: False,
    read=_read,
)
