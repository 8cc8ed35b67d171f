"""Finds the one model in what a file held: a module, a state dict, or a list or dict around one.

Also takes wrappers off: DataParallel and torch.compile around modules, and their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from qrnn_export.layouts.loss import note_on_loss
from qrnn_export.wrappers import without_wrappers
from qrnn_serve.core.errors import CheckpointError
from qrnn_serve.model.checkpoint import unwrap

Payload: TypeAlias = nn.Module | dict[str, Tensor]

_MODEL_KEYS = ("state_dict", "model_state_dict", "model", "net")


def find_payload(saved: Any, notes: list[str]) -> Payload:
    """The module or state dict in `saved`.

    Args:
        saved: What a file held.
        notes: What was taken and what was dropped is added here.

    Raises:
        CheckpointError: There is none, or more than one.
    """
    if isinstance(saved, nn.Module):
        return _unwrapped(saved, notes)
    if isinstance(saved, Mapping):
        return _from_mapping(saved, notes)
    if isinstance(saved, Sequence) and not isinstance(saved, (str, bytes)):
        return _from_sequence(saved, notes)
    if isinstance(module := getattr(saved, "model", None), nn.Module):
        notes.append(f"taken from the attribute 'model' of {type(saved).__name__}")
        return _unwrapped(module, notes)
    raise CheckpointError(
        f"expected a module, a state dict, or a list or dict around one, got {type(saved).__name__}"
    )


def _from_mapping(saved: Mapping[Any, Any], notes: list[str]) -> Payload:
    if _is_state_dict(saved):
        return without_wrappers({str(k): v for k, v in saved.items()}, notes)
    found = [key for key in _MODEL_KEYS if isinstance(saved.get(key), (nn.Module, Mapping))]
    if len(found) != 1:
        raise CheckpointError(
            f"expected a state dict, or a dict that holds one under one of {list(_MODEL_KEYS)}; "
            f"got {found or 'none of them'} among the keys {_listed(saved)}"
        )
    notes.append(f"taken from the key {found[0]!r}")
    _note_losses([value for key, value in saved.items() if key != found[0]], notes)
    return find_payload(saved[found[0]], notes)


def _from_sequence(saved: Sequence[Any], notes: list[str]) -> Payload:
    modules = [item for item in saved if isinstance(item, nn.Module) and _has_weights(item)]
    candidates = modules or [i for i in saved if isinstance(i, Mapping) and _is_state_dict(i)]
    if len(candidates) > 1:
        # A loss with weights of its own is saved beside the model; only one of them has a QRNN.
        candidates = [m for m in candidates if _has_qrnn_weights(m)] or candidates
    if len(candidates) != 1:
        kinds = [type(item).__name__ for item in saved]
        raise CheckpointError(f"expected one model in the list, found {len(candidates)} in {kinds}")
    notes.append(f"the {type(candidates[0]).__name__} is taken out of a list of {len(saved)}")
    _note_losses([item for item in saved if item is not candidates[0]], notes)
    return find_payload(candidates[0], notes)


def _unwrapped(module: nn.Module, notes: list[str]) -> nn.Module:
    inner = unwrap(module)
    if inner is not module:
        notes.append(f"{type(module).__name__} is taken off the model")
    for parent in list(inner.modules()):
        for name, child in list(parent.named_children()):
            if unwrap(child) is not child:
                notes.append(f"{type(child).__name__} is taken off {name}")
                setattr(parent, name, unwrap(child))
    return inner


def _is_state_dict(saved: Mapping[Any, Any]) -> bool:
    return bool(saved) and all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in saved.items()
    )


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_qrnn_weights(saved: nn.Module | Mapping[str, Tensor]) -> bool:
    return any(".linear." in f".{name}" for name in _tensors(saved))


def _note_losses(others: Sequence[Any], notes: list[str]) -> None:
    for other in others:
        if isinstance(other, nn.Module) or (isinstance(other, Mapping) and _is_state_dict(other)):
            notes += note_on_loss(type(other).__name__, _tensors(other))


def _tensors(saved: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return saved.state_dict() if isinstance(saved, nn.Module) else saved


def _listed(saved: Mapping[Any, Any], limit: int = 8) -> str:
    names = [str(key) for key in saved]
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
