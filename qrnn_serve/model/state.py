"""What a sequence carries from one call to the next, and the forms it takes.

For each layer and direction: the last cell value [H], and the last window - 1 inputs. Forms:

- the explicit `QRNNState`, with both;
- the hidden state as the salesforce classes and nn.LSTM have it, cells only: one tensor
  [L * D, B, H] when all layers have one width, else a list with [D, B, H] for each layer;
- one tensor [B, S] in artefacts and on the wire, laid out by `state_layout`; zeros are "no state".

Inside, cells and inputs are lists ordered layer 0 forward, layer 0 backward, layer 1 forward, ...,
with cells [B, H] and inputs [B, (window - 1) * I], oldest first.

Letters: B sequences, L layers, D directions, H hidden, I inputs of the layer, S columns of a state.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from qrnn_serve.core.errors import InputError
from qrnn_serve.core.manifest import StateSlice
from qrnn_serve.model.config import QRNNConfig


class QRNNState(NamedTuple):
    """The whole carried state of a batch. The batch axis of every tensor is axis 1.

    Attributes:
        cells: For each layer [D, B, H]: the cell value after the last timestep.
        inputs: For each layer [D, B, (window - 1) * I]: the layer's last inputs, oldest first.
    """

    cells: list[Tensor]
    inputs: list[Tensor]

    def detach(self) -> "QRNNState":
        """The same values, cut from the graph: for training on chunks of long sequences."""
        return QRNNState([t.detach() for t in self.cells], [t.detach() for t in self.inputs])

    def to(self, device: torch.device | str) -> "QRNNState":
        """The same values on another device."""
        return QRNNState([t.to(device) for t in self.cells], [t.to(device) for t in self.inputs])


Hidden: TypeAlias = Tensor | Sequence[Tensor] | QRNNState
"""The kinds of state that a module takes and gives back."""


def state_widths(config: QRNNConfig) -> list[int]:
    """Columns of cell, inputs, cell, ... in the order of the state tensor; 0 for window 1."""
    widths: list[int] = []
    for number, layer in enumerate(config.layers):
        inputs = (layer.window - 1) * config.layer_input_size(number)
        widths += [layer.hidden_size, inputs] * config.num_directions
    return widths


def state_layout(config: QRNNConfig) -> tuple[StateSlice, ...]:
    """Where each part of the carried state lies in the columns of the state tensor [B, S]."""
    slices: list[StateSlice] = []
    start = 0
    for position, width in enumerate(state_widths(config)):
        if width:
            slices.append(
                StateSlice(
                    layer=position // (2 * config.num_directions),
                    direction="backward" if position // 2 % config.num_directions else "forward",
                    kind="inputs" if position % 2 else "cell",
                    start=start,
                    stop=start + width,
                )
            )
        start += width
    return tuple(slices)


def split_state(state: Tensor, widths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """[B, S] to the lists of cells and of inputs. Can be scripted."""
    parts = list(torch.split(state, widths, dim=1))
    return parts[0::2], parts[1::2]


def join_state(cells: list[Tensor], inputs: list[Tensor]) -> Tensor:
    """The lists of cells and of inputs to [B, S]. Can be scripted."""
    parts: list[Tensor] = []
    for position in range(len(cells)):
        parts.append(cells[position])
        parts.append(inputs[position])
    return torch.cat(parts, dim=1)


def lists_from_hidden(
    hidden: Hidden, config: QRNNConfig, batch: int
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Check a caller's state and take it apart.

    Args:
        hidden: Any of the kinds of `Hidden`, with a batch axis.
        config: The stack it is for.
        batch: B of the input.

    Returns:
        Cells [B, H] and inputs [B, (window - 1) * I]; None for the inputs when `hidden` has only
        cells.

    Raises:
        InputError: A size or the number of tensors does not fit; both are named.
    """
    directions = config.num_directions
    widths = [layer.hidden_size for layer in config.layers]
    if isinstance(hidden, QRNNState):
        input_widths = state_widths(config)[1 :: 2 * directions]
        cells = _per_direction("state cells", hidden.cells, widths, directions, batch)
        return cells, _per_direction("state inputs", hidden.inputs, input_widths, directions, batch)
    if not isinstance(hidden, Tensor):
        return _per_direction("hidden", hidden, widths, directions, batch), None
    if len(set(widths)) > 1:
        raise InputError(
            f"hidden: layers have widths {widths}, which do not fit in one tensor; pass a list "
            f"with [{directions}, {batch}, H] for each layer, or what the last call returned"
        )
    expected = (len(widths) * directions, batch, widths[0])
    if hidden.shape != expected:
        raise InputError(
            f"hidden: expected [layers * directions, batch, hidden] = {list(expected)}, "
            f"got {list(hidden.shape)}"
        )
    return list(hidden.unbind(0)), None


def _per_direction(
    name: str, tensors: Sequence[Tensor], widths: list[int], directions: int, batch: int
) -> list[Tensor]:
    if len(tensors) != len(widths):
        raise InputError(
            f"{name}: expected one tensor for each of {len(widths)} layers, got {len(tensors)}; "
            "a QRNN carries one cell state, not the pair (h, c) of nn.LSTM"
        )
    parts: list[Tensor] = []
    for number, (tensor, width) in enumerate(zip(tensors, widths, strict=True)):
        expected = (directions, batch, width)
        if tensor.shape != expected:
            raise InputError(
                f"{name}[{number}]: expected [directions, batch, width] = {list(expected)}, "
                f"got {list(tensor.shape)}"
            )
        parts += tensor.unbind(0)
    return parts


def hidden_from_lists(
    given: Hidden | None, cells: list[Tensor], inputs: list[Tensor], directions: int
) -> Hidden:
    """Put cells and inputs together in the kind that the caller passed.

    None and a tensor give a tensor, or a list when the widths differ; a list gives a list.
    """
    if isinstance(given, QRNNState):
        return QRNNState(_per_layer(cells, directions), _per_layer(inputs, directions))
    equal = len({cell.shape[-1] for cell in cells}) == 1
    if equal and (given is None or isinstance(given, Tensor)):
        return cells[0].unsqueeze(0) if len(cells) == 1 else torch.stack(cells)
    return _per_layer(cells, directions)


def _per_layer(parts: list[Tensor], directions: int) -> list[Tensor]:
    return [
        torch.stack(parts[start : start + directions]) for start in range(0, len(parts), directions)
    ]


def with_batch_axis(hidden: Hidden | None) -> Hidden | None:
    """The state of one unbatched sequence as that of a batch of one. A QRNNState always has B."""
    if hidden is None or isinstance(hidden, QRNNState):
        return hidden
    if isinstance(hidden, Tensor):
        return hidden.unsqueeze(1)
    return [tensor.unsqueeze(1) for tensor in hidden]


def without_batch_axis(hidden: Hidden) -> Hidden:
    """The inverse of `with_batch_axis`."""
    if isinstance(hidden, QRNNState):
        return hidden
    if isinstance(hidden, Tensor):
        return hidden.squeeze(1)
    return [tensor.squeeze(1) for tensor in hidden]
