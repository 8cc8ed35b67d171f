"""Layout of word language models of salesforce/awd-lstm-lm with QRNN layers.

    encoder.weight                               [V, E]
    rnns.{l}.linear.module.weight_raw, .bias     weight drop around each layer's linear
    decoder.weight, decoder.bias                 [V, H], [V]; the weight is often the embedding's

The program fixes: window 2 on the first layer (which the shapes show), output gates, zoneout 0.
Its layers keep the last input between calls, of whatever batch came last; that is no weight, and
our model carries it in the state tensor instead.
"""

from __future__ import annotations

import re

from qrnn_export.layouts.base import ImportedWeights, Layout, Tensors
from qrnn_export.layouts.language_model import LanguageModelNames, read_language_model
from qrnn_export.layouts.loss import is_tail_weight
from qrnn_export.layouts.stack import StackFacts
from qrnn_export.layouts.stack_weights import LINEAR
from qrnn_export.options import ImportHints

_NAMES = LanguageModelNames(
    layout="awd_lstm_lm",
    stack=re.compile(r"^rnns\.(?P<layer>\d+)\." + LINEAR),
    embedding=re.compile(r"^encoder\.weight$"),
    decoder=re.compile(r"^decoder\.(weight|bias)$"),
)


def _matches(tensors: Tensors) -> bool:
    known = (_NAMES.stack, _NAMES.embedding, _NAMES.decoder)
    # fastai's weight drop keeps weight_raw beside `module`, not inside.
    return (
        any(_NAMES.stack.match(name) for name in tensors)
        and all(is_tail_weight(n) or any(p.match(n) for p in known) for n in tensors)
        and not any(name.endswith(".linear.weight_raw") for name in tensors)
    )


def _read(tensors: Tensors, hints: ImportHints) -> ImportedWeights:
    return read_language_model(tensors, _NAMES, StackFacts(output_gate=True, zoneout=0.0), hints)


AWD_LSTM_LM = Layout(
    name="awd_lstm_lm",
    describes="language models of salesforce/awd-lstm-lm with QRNN layers",
    matches=_matches,
    read=_read,
)
