"""A stack of QRNN layers, called as nn.LSTM or as the salesforce QRNN."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from qrnn_serve.core.errors import InputError
from qrnn_serve.model.checks import (
    check_input,
    check_like_weights,
    warn_if_use_cuda_contradicts,
)
from qrnn_serve.model.config import Bidirectional, QRNNConfig, ZoneoutRule
from qrnn_serve.model.layer import QRNNLayer
from qrnn_serve.model.packing import arrange, pack_padded, unpack_padded
from qrnn_serve.model.scripting import autocast_is_on
from qrnn_serve.model.settings import config_from_arguments, config_from_layers
from qrnn_serve.model.state import (
    Hidden,
    QRNNState,
    hidden_from_lists,
    lists_from_hidden,
    state_widths,
    with_batch_axis,
    without_batch_axis,
)
from qrnn_serve.model.window import as_row, as_window


class QRNN(nn.Module):
    """A stack of QRNN layers (Bradbury et al. 2016, arXiv 1611.01576).

    A drop-in for the salesforce QRNN, and for nn.LSTM where a QRNN can be: the state is one cell
    value per layer, not a pair.

    Args:
        input_size: Width I of one timestep of input; may be None with `layers`.
        hidden_size: Width H of every layer, or a list with one for each; may be None with `layers`.
        num_layers: Number of layers L; a list of hidden sizes says it too.
        bias: Whether the gates have a bias.
        batch_first: Input and output are [B, T, ...] instead of [T, B, ...]. States never are.
        dropout: Share of values dropped between layers in training.
        bidirectional: Run a second set of layers from the end to the start.
        layers: Ready-made layers, used instead of making any. One direction only.
        save_prev_x: Keep each layer's last window - 1 inputs in the module until `reset`, for old
            code.
        zoneout: Share of forget gates set to 0 in training, one value or one for each layer.
        window: Timesteps that the gates of one timestep see, one value or one for each layer.
        output_gate: fo-pooling or f-pooling, one value or one for each layer.
        use_cuda: Accepted for old code. The input's device chooses the kernel; a setting that says
            otherwise is reported once.
        bidirectional_rule: "per_layer" joins both directions after each layer, as nn.LSTM; "stacks"
            runs two independent stacks and joins them after the last layer, as fastai.
        zoneout_rule: What zoneout does when evaluating; see `QRNNLayer`.
        weight_drop: Share of each weight's entries dropped in training; see `QRNNLayer`.
        device: Where the weights are made.
        dtype: Type of the weights.

    Raises:
        ConfigError: A setting is out of range, or two of them contradict each other.
    """

    __jit_ignored_attributes__ = ("_config",)
    __jit_unused_properties__ = ("config",)

    def __init__(  # noqa: PLR0913  (the order is that of nn.LSTM and of the salesforce class)
        self,
        input_size: int | None,
        hidden_size: int | Sequence[int] | None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        layers: Sequence[QRNNLayer] | None = None,
        *,
        save_prev_x: bool = False,
        zoneout: float | Sequence[float] = 0.0,
        window: int | Sequence[int] = 1,
        output_gate: bool | Sequence[bool] = True,
        use_cuda: bool | None = None,
        bidirectional_rule: Bidirectional = "per_layer",
        zoneout_rule: ZoneoutRule = "salesforce",
        weight_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        settings = {
            "bias": bias,
            "dropout": dropout,
            "bidirectional": bidirectional,
            "bidirectional_rule": bidirectional_rule,
            "save_prev_x": save_prev_x,
            "zoneout": zoneout,
            "zoneout_rule": zoneout_rule,
            "window": window,
            "output_gate": output_gate,
            "weight_drop": weight_drop,
        }
        backward_layers: list[QRNNLayer] = []
        if layers is None:
            config = config_from_arguments(input_size, hidden_size, num_layers, settings)
            options = {"save_prev_x": save_prev_x, "device": device, "dtype": dtype}
            forward_layers = _make_layers(config, reverse=False, **options)
            if bidirectional:
                backward_layers = _make_layers(config, reverse=True, **options)
        else:
            config = config_from_layers(layers, input_size, hidden_size, num_layers, settings)
            forward_layers = list(layers)
        self._config = config
        self.input_size = config.input_size
        self.num_layers = len(config.layers)
        self.num_directions = config.num_directions
        self.bidirectional_rule: str = config.bidirectional
        self.dropout = config.dropout
        self.state_widths = state_widths(config)
        self.batch_first = batch_first
        self.use_cuda = use_cuda
        # Any, because torch types the members of a ModuleList as plain modules.
        self.layers: Any = nn.ModuleList(forward_layers)
        self.layers_bwd: Any = nn.ModuleList(backward_layers)

    @classmethod
    def from_config(cls, config: QRNNConfig, **options: Any) -> "QRNN":
        """Build the stack that `config` describes.

        Args:
            config: Everything that changes a number.
            **options: What does not: batch_first, save_prev_x, device, dtype.
        """
        return cls(
            config.input_size,
            [layer.hidden_size for layer in config.layers],
            len(config.layers),
            config.bias,
            dropout=config.dropout,
            bidirectional=config.bidirectional != "no",
            zoneout=[layer.zoneout for layer in config.layers],
            window=[layer.window for layer in config.layers],
            output_gate=[layer.output_gate for layer in config.layers],
            bidirectional_rule=(
                "per_layer" if config.bidirectional == "no" else config.bidirectional
            ),
            zoneout_rule=config.zoneout_rule,
            weight_drop=config.weight_drop,
            **options,
        )

    @property
    def config(self) -> QRNNConfig:
        """Everything about the stack that changes a number, as data."""
        return self._config

    def forward(
        self, input: Tensor, hidden: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the stack.

        The annotations are those of the scripted form, which takes and gives plain tensors: a
        batch, and states of layers of one width. Eager calls take all that is said here.

        Args:
            input: [T, B, I] ([B, T, I] with `batch_first`), one unbatched sequence [T, I], or a
                PackedSequence, sorted or not.
            hidden: State before the first timestep: None for zeros, a tensor [L * D, B, H], a list
                with [D, B, H] for each layer, or a `QRNNState` with the windows' inputs too. Always
                in the original order of the batch. Without the batch axis for an unbatched
                sequence, except in a `QRNNState`.
            lengths: [B] timesteps of each row, each from 0 to T, when they differ; a CPU tensor or
                a list is read without waiting for a GPU. Padded timesteps are neither read nor
                computed.

        Returns:
            The output of the last layer in the form of the input, [..., D * H], exactly 0 at padded
            timesteps; and the state after each row's last timestep in the kind of `hidden` (None
            gives a tensor, or a list when the layers' widths differ).

        Raises:
            InputError: A rank, size, length or device does not fit.
            DTypeError: A dtype does not fit.
        """
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]  (documented by torch)
            return self._forward_scripted(input, hidden, lengths)
        else:  # noqa: RET505  (TorchScript skips the branch only when it is written out)
            return self._forward_eager(input, hidden, lengths)

    def _forward_eager(
        self,
        input: Tensor | PackedSequence,
        hidden: Hidden | None,
        lengths: Tensor | Sequence[int] | None,
    ) -> tuple[Any, Any]:
        weight = self.layers[0].linear.weight
        check_input(input, self.input_size, weight, self.batch_first)
        for module in (self, *self.layers):
            warn_if_use_cuda_contradicts(module, weight)
        arranged = arrange(input, lengths, self.batch_first)
        unbatched = isinstance(input, Tensor) and input.dim() == 2
        given = with_batch_axis(hidden) if unbatched else hidden
        cells, inputs = self._initial_lists(given, arranged.batch, weight)
        output, cells, inputs = self.run(
            arranged.values, arranged.offsets, cells, inputs, arranged.longest
        )
        if not isinstance(given, QRNNState):
            self._remember(inputs)
        state = hidden_from_lists(given, cells, inputs, self.num_directions)
        return arranged.restore(output), without_batch_axis(state) if unbatched else state

    def _forward_scripted(
        self, input: Tensor, hidden: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if input.dim() != 3 or input.size(2) != self.input_size:
            raise InputError(
                f"input: a scripted QRNN takes [time, batch, {self.input_size}] (batch first if it "
                f"was made so), got shape {list(input.shape)}"
            )
        widths = self.state_widths[0::2]
        if min(widths) != max(widths):
            raise InputError(
                f"hidden: the layers have widths {widths}, which do not fit in one tensor; script "
                "a SequenceModel, or a module that calls run"
            )
        for layer in self.layers:
            if layer.save_prev_x and layer.window > 1:
                raise InputError("save_prev_x: a scripted QRNN keeps nothing between calls")
        batch = input.size(0) if self.batch_first else input.size(1)
        cells = [input.new_zeros([batch, width]) for width in widths]
        inputs = [input.new_zeros([batch, width]) for width in self.state_widths[1::2]]
        if hidden is not None:
            expected = [len(cells), batch, widths[0]]
            if list(hidden.shape) != expected:
                raise InputError(f"hidden: expected {expected}, got {list(hidden.shape)}")
            cells = list(hidden.unbind(0))
        if lengths is None:
            dense = input.transpose(0, 1) if self.batch_first else input
            output, cells, _ = self.run(dense, None, cells, inputs)
            output = output.transpose(0, 1) if self.batch_first else output
            return output, torch.stack(cells)
        values, offsets, index = pack_padded(input, lengths, self.batch_first)
        longest = input.size(1 if self.batch_first else 0)
        output, cells, _ = self.run(values, offsets, cells, inputs, longest)
        return unpack_padded(output, index, input.size(0), input.size(1)), torch.stack(cells)

    def run(
        self,
        values: Tensor,
        offsets: Tensor | None,
        cells: list[Tensor] | None,
        inputs: list[Tensor],
        longest: int = 0,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run the stack on dense or packed input. Can be scripted.

        Args:
            values: [T, B, I], or packed [N, I] with `offsets`.
            offsets: [B + 1] int32 or int64, from 0 to N, on the same device; None for dense input.
            cells: [B, H] for each layer and direction, in the order of `state`; None is zeros of
                the dtype that the layers compute in.
            inputs: [B, (window - 1) * I], likewise; [B, 0] is zeros.
            longest: As in `QRNNLayer.run`.

        Returns:
            Output [T, B, D * H] or [N, D * H], and the lists as the next timestep would need them.
        """
        if self.bidirectional_rule == "per_layer":
            return self._run_joined(values, offsets, cells, inputs, longest)
        new_cells: list[Tensor] = []
        new_inputs: list[Tensor] = []
        output = values
        for number, layer in enumerate(self.layers):
            at = self.num_directions * number
            if number > 0 and self.training:
                output = F.dropout(output, self.dropout)
            previous = as_window(inputs[at], layer.input_size)
            output, cell, previous = layer.run(output, offsets, _cell(cells, at), previous, longest)
            new_cells.append(cell)
            new_inputs.append(as_row(previous))
        if self.bidirectional_rule == "no":
            return output, new_cells, new_inputs
        back = values
        for number, layer in enumerate(self.layers_bwd):
            at = 2 * number + 1
            if number > 0 and self.training:
                back = F.dropout(back, self.dropout)
            previous = as_window(inputs[at], layer.input_size)
            back, cell, previous = layer.run(back, offsets, _cell(cells, at), previous, longest)
            new_cells.insert(at, cell)
            new_inputs.insert(at, as_row(previous))
        return torch.cat([output, back], dim=-1), new_cells, new_inputs

    def _run_joined(
        self,
        values: Tensor,
        offsets: Tensor | None,
        cells: list[Tensor] | None,
        inputs: list[Tensor],
        longest: int,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        new_cells: list[Tensor] = []
        new_inputs: list[Tensor] = []
        output = values
        # strict is an argument of Python's zip that TorchScript does not know.
        for number, (ahead, back) in enumerate(zip(self.layers, self.layers_bwd)):  # noqa: B905
            at = 2 * number
            if number > 0 and self.training:
                output = F.dropout(output, self.dropout)
            before = as_window(inputs[at], ahead.input_size)
            left, cell, before = ahead.run(output, offsets, _cell(cells, at), before, longest)
            after = as_window(inputs[at + 1], back.input_size)
            right, cell_back, after = back.run(
                output, offsets, _cell(cells, at + 1), after, longest
            )
            output = torch.cat([left, right], dim=-1)
            new_cells += [cell, cell_back]
            new_inputs += [as_row(before), as_row(after)]
        return output, new_cells, new_inputs

    def initial_state(self, batch: int) -> QRNNState:
        """The explicit state of `batch` sequences that have not begun: zeros, like the weights."""
        weight = self.layers[0].linear.weight
        directions = self.num_directions
        widths = self.state_widths[:: 2 * directions]
        input_widths = self.state_widths[1 :: 2 * directions]
        return QRNNState(
            [weight.new_zeros(directions, batch, width) for width in widths],
            [weight.new_zeros(directions, batch, width) for width in input_widths],
        )

    def reset(self) -> None:
        """Forget the inputs kept by `save_prev_x`."""
        for layer in self.layers:
            layer.reset()

    def flatten_parameters(self) -> None:
        """Nothing to do; here because code written for nn.LSTM calls it."""

    def _initial_lists(
        self, given: Hidden | None, batch: int, weight: Tensor
    ) -> tuple[list[Tensor] | None, list[Tensor]]:
        inputs = None
        if given is None and not autocast_is_on(weight):
            cells = None
        elif given is None:
            # The gates are in another dtype than the state, which stays in that of the weights. No
            # layer writes to its state, so layers of one width share their zeros.
            zeros = {w: weight.new_zeros(batch, w) for w in set(self.state_widths[::2])}
            cells = [zeros[width] for width in self.state_widths[::2]]
        else:
            cells, inputs = lists_from_hidden(given, self._config, batch)
            for tensor in cells + (inputs or []):
                check_like_weights("hidden", tensor, weight)
            cells = [cell.to(weight.dtype) for cell in cells]
        if inputs is None:
            inputs = self._recalled(batch, weight)
        return cells, inputs

    def _recalled(self, batch: int, weight: Tensor) -> list[Tensor]:
        pairs = zip(self.layers, self.layers_bwd or self.layers, strict=True)
        both = [layer for pair in pairs for layer in pair[: self.num_directions]]
        if all(layer.previous_inputs is None for layer in both):
            return [weight.new_empty(batch, 0)] * len(both)
        return [as_row(layer.recall(batch)) for layer in both]

    def _remember(self, inputs: list[Tensor]) -> None:
        if not any(self.state_widths[1::2]):
            return
        for layer, kept in zip(self.layers, inputs[:: self.num_directions], strict=True):
            if layer.save_prev_x:
                layer.remember(as_window(kept, layer.input_size))


def _cell(cells: list[Tensor] | None, at: int) -> Tensor | None:
    if cells is None:
        return None
    return cells[at]


def _make_layers(config: QRNNConfig, *, reverse: bool, **options: Any) -> list[QRNNLayer]:
    return [
        QRNNLayer(
            config.layer_input_size(number),
            layer.hidden_size,
            zoneout=layer.zoneout,
            window=layer.window,
            output_gate=layer.output_gate,
            bias=config.bias,
            zoneout_rule=config.zoneout_rule,
            weight_drop=config.weight_drop,
            reverse=reverse,
            **options,
        )
        for number, layer in enumerate(config.layers)
    ]
