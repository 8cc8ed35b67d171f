"""Save and load a whole model: its config and its weights, and nothing that can run."""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.errors import CheckpointError, ConfigError, InputError
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.model.files import atomic_path
from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.model.stack import QRNN
from qrnn_serve.model.stored import FORMAT, FORMAT_VERSION, StoredCheckpoint, read_stored

_LOGGER = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def save(model: nn.Module, path: str | Path) -> None:
    """Write a model to one file, whole or not at all.

    DataParallel, DistributedDataParallel and torch.compile wrappers are taken off. Weights that
    share memory are stored one by one. Weights that are not finite are stored as they are, with a
    warning in the log: a checkpoint changes no number.

    Args:
        model: A `SequenceModel`, or a `QRNN`, which is stored as a model without embedding, pooling
            and head.
        path: Ends in .pt or .safetensors. A file of that name is replaced.

    Raises:
        InputError: Another kind of model, or another ending.
        OSError: The file cannot be written.
    """
    path = Path(path)
    if path.suffix not in (".pt", ".safetensors"):
        raise InputError(f"{path}: expected a name that ends in .pt or .safetensors")
    config, weights = _config_and_weights(unwrap(model))
    tensors = alone(weights)
    _warn_if_not_finite(path, tensors)
    digest = weights_sha256(tensors)
    with atomic_path(path) as temporary:
        if path.suffix == ".pt":
            content = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "config": to_mapping(config),
                "weights_sha256": digest,
                "state_dict": tensors,
            }
            # Given a name, torch.save would store the temporary one in the file.
            with temporary.open("wb") as file:
                torch.save(content, file)
        else:
            metadata = {
                "format": FORMAT,
                "format_version": str(FORMAT_VERSION),
                "config": json.dumps(to_mapping(config), sort_keys=True),
                "weights_sha256": digest,
            }
            safetensors.torch.save_file(tensors, temporary, metadata)


def load(path: str | Path, map_location: torch.device | str = "cpu") -> SequenceModel:
    """Read a model that `save` wrote, in evaluation mode.

    Never unpickles. Names, shapes and sizes are compared with the config before a weight is read,
    and the weights with the hash in the file. Weights that are not finite are kept, with a warning
    in the log.

    Args:
        path: A .pt or .safetensors file; its content decides which.
        map_location: Device to put the weights on.

    Raises:
        CheckpointError: Not there, damaged, of a newer release, from another program, or with
            tensors that do not fit its config.
        UntrustedFileError: Reading it would run code.
    """
    path = Path(path)
    stored = read_stored(path)
    model = _described(path, stored)
    tensors = {name: tensor.clone() for name, tensor in stored.tensors.items()}
    if weights_sha256(tensors) != stored.weights_sha256:
        raise CheckpointError(f"{path}: damaged: the weights are not those that were saved")
    _warn_if_not_finite(path, tensors)
    model.load_state_dict({k: t.to(map_location) for k, t in tensors.items()}, assign=True)
    return model.eval()


def describe(path: str | Path) -> SequenceModel:
    """The model that `load` would give, on the meta device: shapes and dtypes, and no memory.

    Raises:
        CheckpointError: What `load` finds before it reads a weight.
        UntrustedFileError: Reading it would run code.
    """
    path = Path(path)
    stored = read_stored(path)
    model = _described(path, stored)
    dtype = next(iter(stored.tensors.values())).dtype
    return SequenceModel(model.config, device="meta", dtype=dtype).eval()


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel and torch.compile, at any depth."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def weights_sha256(state_dict: Mapping[str, Tensor]) -> str:
    """The identity of a set of weights: a hash over names, dtypes, shapes and bytes.

    The order of the names and the device do not matter.
    """
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().cpu().contiguous()
        shape = "x".join(str(size) for size in tensor.shape)
        digest.update(f"{name} {tensor.dtype} {shape}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _config_and_weights(model: nn.Module) -> tuple[SequenceModelConfig, dict[str, Tensor]]:
    if isinstance(model, SequenceModel):
        return model.config, model.state_dict()
    if isinstance(model, QRNN):
        weights = {f"qrnn.{name}": tensor for name, tensor in model.state_dict().items()}
        return SequenceModelConfig(qrnn=model.config), weights
    raise InputError(f"model: expected a SequenceModel or a QRNN, got {type(model).__name__}")


def alone(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, each with memory of its own and no more: a view would store all that it views."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        tensor = weight.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    return tensors


def _described(path: Path, stored: StoredCheckpoint) -> SequenceModel:
    """The model without memory that a checkpoint's config describes, and its tensors fit."""
    try:
        config = from_mapping(SequenceModelConfig, stored.config, "config")
    except ConfigError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
    model = _without_memory(path, config, stored)
    _check_tensors(path, stored, model.state_dict())
    return model


def _without_memory(
    path: Path, config: SequenceModelConfig, stored: StoredCheckpoint
) -> SequenceModel:
    """The model on the meta device: shapes, and no memory."""
    if len(config.qrnn.layers) > len(stored.tensors):
        raise CheckpointError(
            f"{path}: its config has {len(config.qrnn.layers)} layers, "
            f"but the file has {len(stored.tensors)} tensors"
        )
    try:
        return SequenceModel(config, device="meta")
    except (RuntimeError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path}: damaged: sizes beyond any memory in its config") from error


def _check_tensors(path: Path, stored: StoredCheckpoint, expected: Mapping[str, Tensor]) -> None:
    found = stored.tensors
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name].shape)}, the config says {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    dtypes = {tensor.dtype for tensor in found.values()}
    if len(dtypes) > 1 or not dtypes.issubset(_DTYPES):
        names = sorted(str(dtype) for dtype in dtypes)
        problems.append(f"expected one floating dtype, got {names}")
    if problems:
        shown = "; ".join(problems[:10])
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{path}: its tensors do not fit its config: {shown}{more}")


def _warn_if_not_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    names = [
        name
        for name, tensor in sorted(tensors.items())
        if tensor.numel() and not all(edge.isfinite() for edge in tensor.aminmax())
    ]
    if names:
        _LOGGER.warning("%s: weights with NaN or infinity: %s", path, ", ".join(names))
