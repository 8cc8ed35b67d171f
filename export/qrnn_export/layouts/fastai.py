"""Layouts of fastai's language models and text classifiers with QRNN layers, versions 1 and 2.

    0.encoder.weight, 0.encoder_dp.emb.weight    [V, E], the same tensor
    0.rnns.{l}.layers.0.linear.weight_raw        one QRNN of one layer at each level
    0.rnns.{l}.layers.0.linear.module.bias
    0.rnns.{l}.layers.0.linear.module.weight     version 1: a copy damaged by weight drop
    0.rnns.{l}.layers_bwd.0.linear.weight, .bias version 2, backward direction, no weight drop
    1.decoder.weight, 1.decoder.bias             [V, H], [V]
    1.layers.{0,2,4,6}.*                         classifier, version 1: batch norm, linear, ...
    1.layers.{0,1}.{0,2}.*                       version 2: batch norm, linear without bias; twice

An encoder saved alone has no leading `0.`, one in a classifier has `0.module.`; early files of
version 1 have no `layers.0.`. Both versions fix: output gates, zoneout 0 with no effect when
evaluating, padding id 1, and, since each level is a module of its own, directions that are joined
after each layer. Classifiers join each row's last, largest and mean hidden state.
"""

from __future__ import annotations

import re
from dataclasses import replace

from qrnn_export.layouts.base import ImportedWeights, Layout, Tensors, refuse_unknown
from qrnn_export.layouts.head import HEAD_PART, read_head
from qrnn_export.layouts.language_model import (
    LanguageModelNames,
    read_embedding,
    read_language_model,
)
from qrnn_export.layouts.stack import StackFacts, read_stack
from qrnn_export.layouts.stack_weights import LINEAR
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import CheckpointError
from qrnn_serve.model.config import SequenceModelConfig

_PADDING_ID = 1
_FACTS = StackFacts(output_gate=True, zoneout=0.0, zoneout_rule="fastai", bidirectional="per_layer")
_STACK = re.compile(
    r"^(?:0\.(?:module\.)?)?rnns\.(?P<layer>\d+)\.(?:(?P<stack>layers|layers_bwd)\.0\.)?" + LINEAR
)
_EMBEDDING = re.compile(r"^(?:0\.(?:module\.)?)?(?:encoder|encoder_dp\.emb)\.weight$")
_DECODER = re.compile(r"^1\.decoder\.(weight|bias)$")
_OWN = re.compile(r"^0\.|^encoder_dp\.|^rnns\.\d+\.(layers(_bwd)?\.|linear\.weight_raw$)")
_HEAD = re.compile(r"^1\.layers\.(?P<place>\d+(\.\d+)?)\." + HEAD_PART)
_CLASSIFIER_NOTES = {
    "fastai_v1": "a row is scored as the original scores it alone; in a batch it reads the padding "
    "in front of shorter rows too, and pools only the last max_len tokens (1,400 by default, in "
    "whole chunks) of longer rows",
    "fastai_v2": "of rows longer than max_len (1,440 tokens by default) the original pools only "
    "the last ones, in whole chunks; a y_range, if one was given, is applied to the output by the "
    "caller, since nothing of it is in the file",
}
_OF_VERSION_1 = re.compile(r"rnns\.\d+\.(linear\.|.*\.linear\.module\.weight$)")


def _is_fastai(tensors: Tensors) -> bool:
    return any(_STACK.match(n) for n in tensors) and any(_OWN.match(n) for n in tensors)


def _is_version_1(tensors: Tensors) -> bool:
    return any(_OF_VERSION_1.search(name) for name in tensors)


def _read(tensors: Tensors, hints: ImportHints, layout: str) -> ImportedWeights:
    names = LanguageModelNames(layout, _STACK, _EMBEDDING, _DECODER)
    if any(_HEAD.match(name) for name in tensors):
        return _read_classifier(tensors, names, hints)
    return read_language_model(tensors, names, _FACTS, hints, _PADDING_ID)


def _read_classifier(
    tensors: Tensors, names: LanguageModelNames, hints: ImportHints
) -> ImportedWeights:
    known = (names.stack, names.embedding, _HEAD)
    refuse_unknown(names.layout, [n for n in tensors if not any(p.match(n) for p in known)])
    head = read_head(tensors, _HEAD)
    if head.input_size % 3:
        raise CheckpointError(
            "the head must read the last, largest and mean hidden state, 3 vectors of one width; "
            f"it reads {head.input_size} values"
        )
    embedding = read_embedding(tensors, names.embedding)
    facts = replace(_FACTS, input_size=embedding.shape[1], output_size=head.input_size // 3)
    stack = read_stack(tensors, names.stack, facts, hints)
    if stack.config.num_directions == 2:
        raise CheckpointError(
            "a bidirectional fastai classifier: the original runs its backward direction within "
            "chunks of bptt tokens and reads it at the row's end, so its scores depend on the "
            "chunks, which SequenceModel does not have. The encoder alone can be exported: save it "
            "with learner.save_encoder"
        )
    config = SequenceModelConfig(
        qrnn=stack.config,
        vocabulary_size=embedding.shape[0],
        padding_id=_PADDING_ID if embedding.shape[0] > _PADDING_ID else None,
        pooling="last_max_mean",
        head_hidden_sizes=head.hidden_sizes,
        head_size=head.size,
        head_bias=head.has_bias,
    )
    weights = {"embedding.weight": embedding, **stack.tensors, **head.tensors}
    pooled = "the head reads each row's last, largest and mean hidden state, by the layout"
    notes = (*stack.notes, *head.notes, pooled, _CLASSIFIER_NOTES[names.layout])
    return ImportedWeights(config, weights, notes)


FASTAI_V1 = Layout(
    name="fastai_v1",
    describes="models of fastai 1 with QRNN layers (AWD_LSTM with qrnn=True), and multifit's: "
    "language models, encoders, text classifiers",
    matches=lambda tensors: _is_fastai(tensors) and _is_version_1(tensors),
    read=lambda tensors, hints: _read(tensors, hints, "fastai_v1"),
)

FASTAI_V2 = Layout(
    name="fastai_v2",
    describes="models of fastai 2 (AWD_QRNN): language models and encoders, one-way or "
    "bidirectional, and one-way text classifiers",
    matches=lambda tensors: _is_fastai(tensors) and not _is_version_1(tensors),
    read=lambda tensors, hints: _read(tensors, hints, "fastai_v2"),
)
