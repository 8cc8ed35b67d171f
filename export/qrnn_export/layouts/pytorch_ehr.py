"""Layout of health-record models of ZhiGroup/pytorch_ehr with a QRNN (EHR_QRNN).

    embed.weight                             [V, E]; the embeddings of a visit's codes are summed
    rnn_c.layers.{l}.linear.weight, .bias    QRNN on the visits; window 1, output gates, zoneout 0
    out.weight, out.bias                     [1, H], [1]; sigmoid after it

The program's head reads the hidden state that torchqrnn returns, which is the last layer's cell
state before the output gate. That layer is therefore read without its gate, and its last output is
taken. Code 0 fills short visits, and visits of it alone fill the front of short rows.
"""

from __future__ import annotations

import re
from dataclasses import replace

from torch import Tensor

from qrnn_export.layouts.base import ImportedWeights, Layout, Tensors, refuse_unknown
from qrnn_export.layouts.head import HEAD_PART, read_head
from qrnn_export.layouts.language_model import read_embedding
from qrnn_export.layouts.stack import ImportedStack, StackFacts, read_stack
from qrnn_export.layouts.stack_weights import LINEAR
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError
from qrnn_serve.model.config import QRNNConfig, SequenceModelConfig

_STACK = re.compile(r"^rnn_c\.layers\.(?P<layer>\d+)\." + LINEAR)
_EMBEDDING = re.compile(r"^embed\.weight$")
_HEAD = re.compile(r"^out(?P<place>)\." + HEAD_PART)
_FILL = 0


def _matches(tensors: Tensors) -> bool:
    return any(_STACK.match(name) for name in tensors)


def _read(tensors: Tensors, hints: ImportHints) -> ImportedWeights:
    known = (_STACK, _EMBEDDING, _HEAD)
    refuse_unknown("pytorch_ehr", [n for n in tensors if not any(p.match(n) for p in known)])
    embedding = read_embedding(tensors, _EMBEDDING)
    _refuse_times(tensors, embedding)
    head = read_head(tensors, _HEAD)
    facts = StackFacts(
        input_size=embedding.shape[1],
        output_size=head.input_size,
        window=(1,),
        output_gate=True,
        zoneout=0.0,
    )
    stack = _without_last_gate(read_stack(tensors, _STACK, facts, hints))
    if hints.ids_per_timestep is None:
        raise AmbiguousCheckpointError(
            "the file never says how many codes a visit can have\n  give --ids-per-timestep (the "
            f"most in your data; fill shorter visits with code {_FILL})"
        )
    config = SequenceModelConfig(
        qrnn=stack.config,
        vocabulary_size=embedding.shape[0],
        padding_id=_FILL,
        ids_per_timestep=hints.ids_per_timestep,
        pooling="last",
        head_size=head.size,
        head_bias=head.has_bias,
        output_activation="sigmoid",
    )
    weights = {"embedding.weight": embedding, **stack.tensors, **head.tensors}
    notes = (
        f"--ids-per-timestep {hints.ids_per_timestep}: the embeddings of a visit's codes are "
        f"summed; code {_FILL} adds nothing",
        "sigmoid after the head, by the layout: the output is a probability, [B, 1]",
        "rows are scored without the visits that the original puts in front of short rows of a "
        "batch",
        *_note_on_fill(embedding),
    )
    return ImportedWeights(config, weights, (*stack.notes, *head.notes, *notes))


def _refuse_times(tensors: Tensors, embedding: Tensor) -> None:
    columns = [
        t.shape[-1] for n, t in tensors.items() if re.match(r"rnn_c\.layers\.0\..*weight", n)
    ]
    if embedding.shape[1] + 1 in columns:
        raise CheckpointError(
            f"the QRNN reads {columns[0]} values a visit and the embedding gives "
            f"{embedding.shape[1]}: the model was trained with the time since the last visit "
            "(time=True), which SequenceModel cannot add to embeddings of codes"
        )


def _without_last_gate(stack: ImportedStack) -> ImportedStack:
    """The stack whose output is the last layer's cell state."""
    *below, last = stack.config.layers
    if not last.output_gate:
        return stack
    name, kept = f"qrnn.layers.{len(below)}.linear.", 2 * last.hidden_size
    config: QRNNConfig = replace(stack.config, layers=(*below, replace(last, output_gate=False)))
    cut = {n: t[:kept] if n.startswith(name) else t for n, t in stack.tensors.items()}
    note = "the output gate of the last layer is left out: the head reads its cell state"
    return ImportedStack(config, cut, (*stack.notes, note))


def _note_on_fill(embedding: Tensor) -> tuple[str, ...]:
    if not embedding[_FILL].any():
        return ()
    return (
        f"the embedding of code {_FILL} is not zero (pre-trained?): the original adds it once for "
        "each code that a visit has fewer than the longest one of its batch; here it adds nothing",
    )


PYTORCH_EHR = Layout(
    name="pytorch_ehr",
    describes="health-record models of ZhiGroup/pytorch_ehr (EHR_QRNN)",
    matches=_matches,
    read=_read,
)
