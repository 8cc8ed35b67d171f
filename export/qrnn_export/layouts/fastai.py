"""Layouts of fastai's language models with QRNN layers, versions 1 and 2.

    0.encoder.weight, 0.encoder_dp.emb.weight    [V, E], the same tensor
    0.rnns.{l}.layers.0.linear.weight_raw        one QRNN of one layer at each level
    0.rnns.{l}.layers.0.linear.module.bias
    0.rnns.{l}.layers.0.linear.module.weight     version 1: a copy damaged by weight drop
    0.rnns.{l}.layers_bwd.0.linear.weight, .bias version 2, backward direction, no weight drop
    1.decoder.weight, 1.decoder.bias             [V, H], [V]

An encoder saved alone has no leading `0.`; early files of version 1 have no `layers.0.`. Both
versions fix: output gates, zoneout 0 with no effect when evaluating, padding id 1, and, since each
level is a module of its own, directions that are joined after each layer.
"""

from __future__ import annotations

import re

from qrnn_export.layouts.base import ImportedWeights, Layout, Tensors
from qrnn_export.layouts.language_model import LanguageModelNames, read_language_model
from qrnn_export.layouts.stack import StackFacts
from qrnn_export.layouts.stack_weights import LINEAR
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import CheckpointError

_PADDING_ID = 1
_FACTS = StackFacts(output_gate=True, zoneout=0.0, zoneout_rule="fastai", bidirectional="per_layer")
_STACK = re.compile(
    r"^(?:0\.)?rnns\.(?P<layer>\d+)\.(?:(?P<stack>layers|layers_bwd)\.0\.)?" + LINEAR
)
_EMBEDDING = re.compile(r"^(?:0\.)?(?:encoder|encoder_dp\.emb)\.weight$")
_DECODER = re.compile(r"^1\.decoder\.(weight|bias)$")
_OWN = re.compile(r"^0\.|^encoder_dp\.|^rnns\.\d+\.(layers(_bwd)?\.|linear\.weight_raw$)")
_CLASSIFIER = re.compile(r"^1\.layers\.")
_OF_VERSION_1 = re.compile(r"rnns\.\d+\.(linear\.|.*\.linear\.module\.weight$)")


def _is_fastai(tensors: Tensors) -> bool:
    return any(_STACK.match(n) for n in tensors) and any(_OWN.match(n) for n in tensors)


def _is_version_1(tensors: Tensors) -> bool:
    return any(_OF_VERSION_1.search(name) for name in tensors)


def _read(tensors: Tensors, hints: ImportHints, layout: str) -> ImportedWeights:
    if head := [name for name in tensors if _CLASSIFIER.match(name)]:
        raise CheckpointError(
            f"a fastai text classifier: its head ({', '.join(head[:4])}, ...) has batch "
            "normalisation and hidden layers, which SequenceModel does not have yet (its head is "
            "one linear layer). The encoder alone can be exported: save it with "
            "learner.save_encoder"
        )
    names = LanguageModelNames(layout, _STACK, _EMBEDDING, _DECODER)
    return read_language_model(tensors, names, _FACTS, hints, _PADDING_ID)


FASTAI_V1 = Layout(
    name="fastai_v1",
    describes="language models and encoders of fastai 1 (AWD_LSTM with qrnn=True), and multifit's",
    matches=lambda tensors: _is_fastai(tensors) and _is_version_1(tensors),
    read=lambda tensors, hints: _read(tensors, hints, "fastai_v1"),
)

FASTAI_V2 = Layout(
    name="fastai_v2",
    describes="language models and encoders of fastai 2 (AWD_QRNN), one-way or bidirectional",
    matches=lambda tensors: _is_fastai(tensors) and not _is_version_1(tensors),
    read=lambda tensors, hints: _read(tensors, hints, "fastai_v2"),
)
