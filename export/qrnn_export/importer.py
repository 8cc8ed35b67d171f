"""From a file or a module to the SequenceModel that is exported, with notes on how it was read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qrnn_export.layouts.registry import find_layout
from qrnn_export.options import ImportHints
from qrnn_export.payload import find_payload
from qrnn_export.source_file import read_file, read_safetensors_metadata
from qrnn_export.user_module import holds_our_qrnn, read_user_module
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError
from qrnn_serve.model.checkpoint import load, unwrap
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.model.stack import QRNN
from qrnn_serve.model.stored import FORMAT

_EXPORTED_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A model ready for export.

    Attributes:
        model: In evaluation mode, on the CPU, float32 or float64, with finite weights.
        notes: What was inferred, dropped, converted or taken from a flag.
    """

    model: SequenceModel
    notes: tuple[str, ...]


def import_file(path: Path, hints: ImportHints, *, trust_pickle: bool) -> ImportedModel:
    """Read our own checkpoint, or one of another program.

    Args:
        path: A .pt, .pth, .ckpt or .safetensors file.
        hints: What the file does not hold; not used for our own checkpoints, which hold everything.
        trust_pickle: Unpickle it even if that runs code.

    Raises:
        CheckpointError: The file cannot be used. UntrustedFileError when it would run code,
            AmbiguousCheckpointError when a fact is missing; the message names the flag.
    """
    saved = read_file(path, trust_pickle=trust_pickle)
    if is_ours(path, saved):
        _refuse_hints(path, hints)
        return _ready(load(path), [])
    try:
        return import_saved(saved, hints)
    except AmbiguousCheckpointError as error:
        raise AmbiguousCheckpointError(
            f"{path}: some facts that change scores are not in the file:\n{error}"
        ) from error
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error


def is_ours(path: Path, saved: Any) -> bool:
    """Whether qrnn_serve.save wrote the file at `path` that held `saved`."""
    if not isinstance(saved, Mapping):
        return False
    if saved.get("format") == FORMAT:
        return True
    is_safetensors = all(isinstance(value, Tensor) for value in saved.values())
    if not is_safetensors or path.suffix != ".safetensors":
        return False
    return read_safetensors_metadata(path).get("format") == FORMAT


def import_saved(saved: Any, hints: ImportHints) -> ImportedModel:
    """Turn a module, a state dict, or a list or dict around one into a model.

    A module is copied, but for its weights: the caller's stays as it is.

    Raises:
        CheckpointError: As `import_file`.
    """
    notes: list[str] = []
    if isinstance(saved, nn.Module):
        inner = unwrap(saved)
        if inner is not saved:
            notes.append(f"{type(saved).__name__} is taken off the model")
        saved = _copied(inner)
    payload = find_payload(saved, notes)
    if isinstance(payload, SequenceModel):
        return _ready(payload, notes)
    if isinstance(payload, QRNN):
        notes.append("a QRNN is exported as a model without embedding, pooling and head")
        weights = {f"qrnn.{name}": tensor for name, tensor in payload.state_dict().items()}
        config = SequenceModelConfig(qrnn=payload.config)
        return _ready(_model_with(config, weights), notes)
    tensors: Mapping[str, Tensor]
    if isinstance(payload, nn.Module) and hints.layout is None and holds_our_qrnn(payload):
        if hints != ImportHints():
            raise CheckpointError("the flags describe a foreign checkpoint, and this is a module")
        return _ready(read_user_module(payload.to("cpu").eval(), _model_with, notes), notes)
    if isinstance(payload, nn.Module):
        hints = _completed_by_module(payload, hints, notes)
        tensors = payload.state_dict()
    else:
        tensors = payload
    layout = find_layout(tensors, hints.layout)
    notes.append(f"read as layout {layout.name!r}: {layout.describes}")
    imported = layout.read(tensors, hints)
    if hints.ids_per_timestep not in (None, imported.config.ids_per_timestep):
        raise CheckpointError(
            f"--ids-per-timestep {hints.ids_per_timestep}: models of the layout {layout.name!r} "
            "have one id a timestep, or features"
        )
    model = _model_with(imported.config, imported.tensors)
    return _ready(model, [*notes, *imported.notes])


def _copied(module: nn.Module) -> nn.Module:
    """A copy with parameters of its own over the same memory, which may be large."""
    parameters = [p for p in module.parameters() if type(p) is nn.Parameter]
    own = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in parameters}
    return copy.deepcopy(module, own)


def _refuse_hints(path: Path, hints: ImportHints) -> None:
    """Our own file says everything; a flag that says something else would be ignored in silence."""
    if hints != ImportHints():
        raise CheckpointError(
            f"{path}: this checkpoint of qrnn_serve.save holds its whole configuration; leave out "
            "the flags that describe a foreign one (--layout, --hidden, --window, --output-gate, "
            "--zoneout, --zoneout-rule, --bidirectional, --ids-per-timestep)"
        )


def _completed_by_module(module: nn.Module, hints: ImportHints, notes: list[str]) -> ImportHints:
    """Read from the layers of an unpickled torchqrnn or fastai module what a state dict lacks."""
    layers: list[Any] = [
        m
        for name, m in module.named_modules()
        if hasattr(m, "linear") and hasattr(m, "window") and "layers_bwd." not in name
    ]
    if not layers:
        return hints
    sizes = tuple(int(layer.hidden_size) for layer in layers)
    windows = tuple(int(layer.window) for layer in layers)
    zoneouts = {float(getattr(layer, "zoneout", 0.0)) for layer in layers}
    if len(zoneouts) > 1:
        raise CheckpointError(
            f"the layers of the module have different zoneouts {sorted(zoneouts)}, which no "
            "layout covers; rebuild the model with qrnn_serve.QRNN"
        )
    notes.append(f"from the module: hidden sizes {sizes}, windows {windows}, zoneout {zoneouts}")
    zoneout = hints.zoneout if hints.zoneout is not None else zoneouts.pop()
    # The class says which rule its zoneout follows, as no tensor does.
    rule = "fastai" if type(layers[0]).__module__.startswith("fastai.") else None
    return replace(
        hints,
        hidden_size=hints.hidden_size or sizes,
        window=hints.window or windows,
        zoneout=zoneout,
        zoneout_rule=hints.zoneout_rule or rule,
    )


def _model_with(config: SequenceModelConfig, tensors: Mapping[str, Tensor]) -> SequenceModel:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        raise CheckpointError(
            f"expected weights of one floating dtype, got {sorted(str(d) for d in dtypes)}"
        )
    for name, tensor in tensors.items():
        # A file can declare a tensor of any size over a few bytes (strides of 0).
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{name}: damaged: the file does not hold all of its values")
    model = SequenceModel(config, device="meta", dtype=dtypes.pop())
    own = {name: _whole(tensor) for name, tensor in tensors.items()}
    model.load_state_dict(own, assign=True)
    return model


def _whole(tensor: Tensor) -> Tensor:
    """The tensor itself, on the CPU; a copy if it is a part of a larger one, or strided.

    TorchScript stores all that a tensor is a part of.
    """
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _ready(model: SequenceModel, notes: list[str]) -> ImportedModel:
    model = model.to("cpu").eval().requires_grad_(False)
    for name, tensor in model.state_dict().items():
        # isfinite would take more memory than the tensor.
        if tensor.numel() and not all(edge.isfinite() for edge in tensor.aminmax()):
            raise CheckpointError(
                f"{name} holds NaN or infinity, so scores would be NaN; was the model saved "
                "after its training had diverged?"
            )
    dtype = model.qrnn.layers[0].linear.weight.dtype
    if dtype not in _EXPORTED_DTYPES:
        model = model.to(torch.float32)
        notes = [*notes, f"{dtype} weights are exported as float32, which holds them exactly"]
    return ImportedModel(model, tuple(notes))
