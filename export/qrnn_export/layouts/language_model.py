"""Reads language models: embedding, QRNN layers and, unless the encoder is alone, a decoder."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qrnn_export.layouts.base import ImportedWeights, Tensors, refuse_unknown
from qrnn_export.layouts.loss import is_tail_weight, note_on_loss
from qrnn_export.layouts.stack import StackFacts, read_stack
from qrnn_export.options import ImportHints
from qrnn_serve.core.errors import CheckpointError
from qrnn_serve.model.config import SequenceModelConfig


@dataclass(frozen=True, slots=True)
class LanguageModelNames:
    """How a program names the tensors of its language model.

    Attributes:
        layout: The layout's name, for messages.
        stack: The QRNN's, as `sort_weights` takes it.
        embedding: The embedding [V, E], under one or more names.
        decoder: Its group 1 is weight [V, H] or bias [V].
    """

    layout: str
    stack: re.Pattern[str]
    embedding: re.Pattern[str]
    decoder: re.Pattern[str]


def read_language_model(
    tensors: Tensors,
    names: LanguageModelNames,
    facts: StackFacts,
    hints: ImportHints,
    padding_id: int | None = None,
) -> ImportedWeights:
    """Read a language model whose output is the decoder's logits at every timestep.

    Args:
        tensors: The state dict.
        names: How the program names them.
        facts: What the layout fixes of the QRNN, without its widths.
        hints: What the caller says.
        padding_id: The id that the program pads with, which changes no score.

    Raises:
        CheckpointError: A tensor is missing or unknown, or does not fit.
    """
    loss = {name: tensor for name, tensor in tensors.items() if is_tail_weight(name)}
    known = (names.stack, names.embedding, names.decoder)
    rest = [n for n in tensors if n not in loss and not any(p.match(n) for p in known)]
    refuse_unknown(names.layout, rest)
    notes: list[str] = []
    embedding = read_embedding(tensors, names.embedding)
    head = _decoder(tensors, names, embedding, notes)
    widths = replace(
        facts,
        input_size=embedding.shape[1],
        output_size=head["head.weight"].shape[1] if head else None,
    )
    stack = read_stack(tensors, names.stack, widths, hints)
    vocabulary = embedding.shape[0]
    if padding_id is not None and padding_id < vocabulary:
        notes.append(f"padding id {padding_id}, by the layout; it changes no score")
    else:
        padding_id = None
    config = SequenceModelConfig(
        qrnn=stack.config,
        vocabulary_size=vocabulary,
        padding_id=padding_id,
        head_size=head["head.weight"].shape[0] if head else None,
        head_bias="head.bias" in head,
    )
    ours = {"embedding.weight": embedding, **stack.tensors, **head}
    return ImportedWeights(config, ours, (*stack.notes, *notes, *note_on_loss("file", loss)))


def read_embedding(tensors: Tensors, pattern: re.Pattern[str]) -> Tensor:
    """The embedding [V, E], which may stand under several names that fit `pattern`.

    Raises:
        CheckpointError: There is none, it is no matrix, or the names hold different ones.
    """
    found = [name for name in tensors if pattern.match(name)]
    if not found:
        raise CheckpointError(
            f"the embedding is missing: expected a name like {pattern.pattern} among "
            f"{', '.join(list(tensors)[:8])}"
        )
    embedding = tensors[found[0]]
    if embedding.dim() != 2 or 0 in embedding.shape:
        raise CheckpointError(f"{found[0]}: expected [V, E], got {list(embedding.shape)}")
    for name in found[1:]:
        if not torch.equal(tensors[name], embedding):
            raise CheckpointError(
                f"{found[0]} and {name} are one embedding in the original program, but differ (or "
                "hold NaN) in this file"
            )
    return embedding


def _decoder(
    tensors: Tensors, names: LanguageModelNames, embedding: Tensor, notes: list[str]
) -> dict[str, Tensor]:
    head = {f"head.{m[1]}": t for n, t in tensors.items() if (m := names.decoder.match(n))}
    if not head:
        notes.append("no decoder in the file: the output is the last layer's hidden state")
        return head
    if "head.weight" not in head:
        # Formats that store a tensor once leave out the second name of a tied weight.
        notes.append("the decoder's weight is not in the file, so it is tied: the embedding's")
        head["head.weight"] = embedding
    elif torch.equal(head["head.weight"], embedding):
        notes.append("the decoder's weight is the embedding's (tied)")
        head["head.weight"] = embedding
    weight, bias = head["head.weight"], head.get("head.bias")
    if weight.dim() != 2:
        raise CheckpointError(f"decoder weight: expected [V, H], got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise CheckpointError(
            f"decoder bias: expected one for each of {weight.shape[0]} words, got "
            f"{list(bias.shape)}"
        )
    return head
