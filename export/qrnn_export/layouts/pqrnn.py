"""Layout of text classifiers of ChenghaoMou/pytorch-pQRNN, saved by Lightning.

    hidden.layers.{l}.linear.weight, .bias   QRNN on the projections
    output.{1,3,5}.weight, .bias             linear layers, ReLU before each

The program computes Hardtanh, QRNN, mean over time, head. It fixes window 1, output gates and
zoneout 0. Its mean is over all timesteps of a padded batch; ours is over the row's own, which is
what the program gives for a row alone. Without torchqrnn it trains an LSTM under the same name.
"""

from __future__ import annotations

import re

from qrnn_export.layouts.base import ImportedWeights, Layout, Tensors, refuse_unknown
from qrnn_export.layouts.head import HEAD_PART, read_head
from qrnn_export.layouts.stack import StackFacts, read_stack
from qrnn_export.layouts.stack_weights import LINEAR
from qrnn_export.options import ImportHints
from qrnn_serve.model.config import SequenceModelConfig

_STACK = re.compile(r"^hidden\.layers\.(?P<layer>\d+)\." + LINEAR)
_HEAD = re.compile(r"^output\.(?P<place>\d+)\." + HEAD_PART)


def _matches(tensors: Tensors) -> bool:
    return all(any(p.match(name) for name in tensors) for p in (_STACK, _HEAD))


def _read(tensors: Tensors, hints: ImportHints) -> ImportedWeights:
    known = (_STACK, _HEAD)
    refuse_unknown("pqrnn", [n for n in tensors if not any(p.match(n) for p in known)])
    head = read_head(tensors, _HEAD)
    facts = StackFacts(output_size=head.input_size, window=(1,), output_gate=True, zoneout=0.0)
    stack = read_stack(tensors, _STACK, facts, hints)
    config = SequenceModelConfig(
        qrnn=stack.config,
        input_activation="hardtanh",
        pooling="mean",
        pooled_activation="relu",
        head_hidden_sizes=head.hidden_sizes,
        head_size=head.size,
        head_bias=head.has_bias,
    )
    notes = (
        "Hardtanh on the input, mean over time, ReLU before each linear layer, by the layout",
        "the mean is over a row's own timesteps; the original's is over the padding too",
    )
    return ImportedWeights(
        config, {**stack.tensors, **head.tensors}, (*stack.notes, *head.notes, *notes)
    )


PQRNN = Layout(
    name="pqrnn",
    describes="text classifiers of ChenghaoMou/pytorch-pQRNN",
    matches=_matches,
    read=_read,
)
