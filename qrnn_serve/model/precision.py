"""How exactly a model keeps its weights: a float type, or int8 with a scale for each output.

Half-precision models take and give float32, and convert inside; the recurrence is computed in
float32 by every kernel. int8 is for the weights of the matrix products alone: symmetric, one scale
for each output channel, multiplied out in float32 before each product.
"""

from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qrnn_serve.core.config import from_mapping
from qrnn_serve.core.errors import ArtefactError, ConfigError
from qrnn_serve.core.manifest import Manifest
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.model.sequence_model import SequenceModel

Precision = Literal["float64", "float32", "float16", "bfloat16", "int8"]
HALF: tuple[Precision, ...] = ("float16", "bfloat16")

_LARGEST_INT8 = 127


class Int8Linear(nn.Module):
    """nn.Linear with its weight in int8.

    Args:
        outputs: Output channels.
        inputs: Input channels.
        bias: Whether there is one.
        device: Where the tensors are made.
    """

    weight: Tensor
    scale: Tensor

    def __init__(
        self, outputs: int, inputs: int, *, bias: bool, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.register_buffer(
            "weight", torch.zeros(outputs, inputs, dtype=torch.int8, device=device)
        )
        self.register_buffer("scale", torch.ones(outputs, device=device))
        # No buffer: TorchScript keeps one that may be None out of the state dict.
        kept = nn.Parameter(torch.zeros(outputs, device=device), requires_grad=False)
        self.bias = kept if bias else None

    @classmethod
    def of(cls, linear: nn.Linear) -> "Int8Linear":
        """The same layer, each weight rounded to one of 255 values from -max to max of its row.

        Raises:
            ConfigError: A weight is NaN or infinite.
        """
        weight = linear.weight.detach().float()
        if not bool(weight.isfinite().all()):
            raise ConfigError("int8: the weights hold NaN or infinity, which int8 cannot")
        largest = weight.abs().amax(dim=1)
        scale = torch.where(largest > 0, largest / _LARGEST_INT8, 1.0)
        made = cls(*weight.shape, bias=linear.bias is not None)
        made.weight = torch.round(weight / scale.unsqueeze(1)).to(torch.int8)
        made.scale = scale
        if linear.bias is not None:
            made.bias = nn.Parameter(linear.bias.detach().float(), requires_grad=False)
        return made

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] float32 to [..., outputs]."""
        weight = self.weight.to(self.scale.dtype) * self.scale.unsqueeze(1)
        return F.linear(input, weight, self.bias)


def precision_of(model: SequenceModel) -> Precision:
    """How the model keeps its weights."""
    dtype = model.qrnn.layers[0].linear.weight.dtype
    return cast("Precision", str(dtype).removeprefix("torch."))


def empty_model(config: SequenceModelConfig, precision: Precision) -> SequenceModel:
    """A model without memory, in evaluation mode, for `load_state_dict(..., assign=True)`."""
    dtype = torch.float32 if precision == "int8" else getattr(torch, precision)
    model = SequenceModel(config, device="meta", dtype=dtype)
    if precision == "int8":
        for parent, name, linear in _linears(model):
            empty = Int8Linear(
                linear.out_features,
                linear.in_features,
                bias=linear.bias is not None,
                device="meta",
            )
            setattr(parent, name, empty)
    model.float32_edges = precision in HALF
    return model.eval()


def described_model(manifest: Manifest, path: Path) -> SequenceModel:
    """The model without memory that an artefact's manifest describes.

    Args:
        manifest: Of the artefact.
        path: The artefact, for messages.

    Raises:
        ArtefactError: The manifest describes no model.
    """
    edge = manifest.outputs[0].dtype if manifest.outputs else "none"
    precision = manifest.precision or edge
    if precision not in get_args(Precision):
        raise ArtefactError(f"{path}: expected a precision of {get_args(Precision)}, {precision!r}")
    try:
        config = from_mapping(SequenceModelConfig, manifest.config, f"{path} manifest.config")
    except ConfigError as error:
        raise ArtefactError(str(error)) from error
    model = empty_model(config, cast("Precision", precision))
    model.float32_edges = edge != precision and precision in HALF
    return model


def convert(model: SequenceModel, precision: Precision) -> SequenceModel:
    """A copy of the model that keeps its weights in another way; it shares what does not change.

    Args:
        model: Not changed.
        precision: Of the copy.

    Raises:
        ConfigError: int8 of weights that are not finite, or of a model that is not float32; or
            a float type of a model that is int8.
    """
    before = precision_of(model)
    if precision == "int8":
        if before != "float32":
            raise ConfigError(f"int8: expected a float32 model, got {before}")
        weights = model.state_dict()
        for parent, name, linear in _linears(model):
            prefix = next(p for p, m in model.named_modules() if m is parent)
            path = f"{prefix}.{name}" if prefix else name
            made = Int8Linear.of(linear).state_dict()
            weights.update({f"{path}.{key}": tensor for key, tensor in made.items()})
    else:
        if before == "int8":
            raise ConfigError(f"{precision}: the model is int8, whose float weights are lost")
        weights = _in_type(model.state_dict(), getattr(torch, precision))
    copy = empty_model(model.config, precision)
    copy.load_state_dict(weights, assign=True)
    return copy.requires_grad_(False)


def _in_type(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors in another type; tied ones, which share their memory, still do."""
    made: dict[tuple[object, ...], Tensor] = {}
    for tensor in weights.values():
        key = _place(tensor)
        if key not in made:
            made[key] = tensor.to(dtype)
    return {name: made[_place(tensor)] for name, tensor in weights.items()}


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _linears(model: SequenceModel) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Every linear layer, its parent and its name there."""
    return [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if isinstance(child, nn.Linear)
    ]
