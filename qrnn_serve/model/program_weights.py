"""Reads the weights in a .pt2 file of qrnn-export without running anything in it.

torch.export.load unpickles, evaluates expressions and loads machine code that a file may hold. Here
the file is a zip of raw bytes: an entry of JSON says where each weight lies, and the model that the
manifest describes says what it is.
"""

import json
import re
import zipfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from qrnn_serve.core.errors import ArtefactError
from qrnn_serve.model.sequence_model import SequenceModel

_WEIGHTS = "archive/data/weights/"
_CONFIG = _WEIGHTS + "model_weights_config.json"
_MODEL = "archive/models/model.json"
_LARGEST_JSON = 256 << 20
# What torch writes about sizes: its symbols, whole numbers, comparisons and classes of sympy.
_EXPRESSION = re.compile(
    r"(?:[A-Z][A-Za-z]*\(|'[su]\d+'|(?:positive|integer|nonnegative)=True|\d+|[-+*/%(),<>= ]"
    r"|L\['(?:input|lengths|state)'\]\.size\(\)\[\d\])*"
)
_OPERATOR = re.compile(r"torch\.ops\.(?:aten|qrnn)\.\w+\.\w+|_operator\.\w+")
_RULES = {"expr_str": _EXPRESSION, "guards_code": _EXPRESSION, "target": _OPERATOR}


def read_program_weights(path: Path, model: SequenceModel) -> dict[str, Tensor]:
    """The tensors of a model's state dict, from a file that was made of it.

    Args:
        path: A .pt2 file.
        model: Says names, shapes and dtypes; may be without memory.

    Raises:
        ArtefactError: The file is damaged, or its tensors are others.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            places = _json(archive, _CONFIG, path)["config"]
            expected = model.state_dict()
            if places.keys() != expected.keys():
                raise ArtefactError(
                    f"{path}: expected weights {sorted(expected)}, got {sorted(places)}"
                )
            return {
                name: _read(archive, places[name], name, like, path)
                for name, like in expected.items()
            }
    except (zipfile.BadZipFile, OSError, KeyError, TypeError) as error:
        raise ArtefactError(f"{path}: damaged or truncated: {error}") from error


def refuse_code(path: Path) -> None:
    """Stop before torch.export.load where a file holds what would run while it is loaded.

    Raises:
        ArtefactError: It does, or it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = entry.filename.partition("/")[2]
                pickled = name.startswith("data/sample_inputs/") and entry.file_size
                objects = name.startswith("data/constants/") and not name.endswith(".json")
                if pickled or objects or name.startswith("data/aotinductor/"):
                    raise ArtefactError(f"{path}: holds {name}, which qrnn-export does not write")
            for place in _json(archive, _CONFIG, path)["config"].values():
                if place["use_pickle"] is not False:
                    raise ArtefactError(f"{path}: holds a pickle, which qrnn-export never writes")
            _refuse_calls(_json(archive, _MODEL, path), path)
    except (zipfile.BadZipFile, OSError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(f"{path}: damaged or truncated: {error}") from error


def _refuse_calls(node: Any, path: Path) -> None:
    """Refuse expressions, which go to Python's eval, and operators, looked up in all of torch."""
    if isinstance(node, list):
        for item in cast("list[Any]", node):
            _refuse_calls(item, path)
    elif isinstance(node, dict):
        for key, value in cast("dict[str, Any]", node).items():
            texts = value if key == "guards_code" else [value] if key in _RULES else []
            for text in texts:
                if not _RULES[key].fullmatch(text):
                    raise ArtefactError(f"{path}: its graph holds {text!r}, which might run")
            _refuse_calls(value, path)


def _json(archive: zipfile.ZipFile, name: str, path: Path) -> Any:
    entry = archive.getinfo(name)
    if entry.file_size > _LARGEST_JSON or entry.compress_type != zipfile.ZIP_STORED:
        raise ArtefactError(f"{path}: {name} is larger than any that qrnn-export writes")
    try:
        return json.loads(archive.read(entry))
    except ValueError as error:
        raise ArtefactError(f"{path}: damaged: {name} is not JSON: {error}") from error


def _read(
    archive: zipfile.ZipFile, place: dict[str, Any], name: str, like: Tensor, path: Path
) -> Tensor:
    entry = archive.getinfo(_WEIGHTS + place["path_name"])
    size = like.numel() * like.element_size()
    # Stored, so that a small file cannot ask for a large memory.
    if entry.file_size != size or entry.compress_type != zipfile.ZIP_STORED:
        raise ArtefactError(f"{path}: {name} has {entry.file_size} bytes, its shape says {size}")
    tensor = torch.empty(like.shape, dtype=like.dtype)
    with archive.open(entry) as file:
        file.readinto(tensor.view(-1).view(torch.uint8).numpy().data)  # pyright: ignore
    return tensor
