"""One QRNN layer: window, one matrix product, recurrent pooling.

Quasi-Recurrent Neural Networks (Bradbury et al. 2016, arXiv 1611.01576), section 2, with f
multiplying the new value as in the salesforce code: c_t = f_t * z_t + (1 - f_t) * c_{t-1}.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from qrnn_serve.core.errors import ConfigError, InputError
from qrnn_serve.kernels import cuda_layer, portable

# A scripted layer calls the operators of torch.ops.qrnn by name, which the import registers.
from qrnn_serve.kernels.ops import fo_pool, linear_fo_pool
from qrnn_serve.model.checks import (
    check_input,
    check_like_weights,
    warn_if_use_cuda_contradicts,
)
from qrnn_serve.model.config import LayerConfig, ZoneoutRule
from qrnn_serve.model.packing import arrange, last_cells, pack_padded, unpack_padded
from qrnn_serve.model.scripting import autocast_is_on
from qrnn_serve.model.window import window_carried, window_columns


class QRNNLayer(nn.Module):
    """One layer in one direction, called as the salesforce QRNNLayer.

    The linear weight is [G * H, window * I]: rows Z, F and, with an output gate, O; columns the
    current input, then the input 1 step back, 2 back, ... in running order.

    Args:
        input_size: Width I of one timestep of input.
        hidden_size: Width H of the cell state; None is `input_size`.
        save_prev_x: Keep the last window - 1 inputs in the module for the next call, until `reset`.
            For old code; new code passes a `QRNNState` through `QRNN`.
        zoneout: Share p of forget gates set to 0 in training.
        window: Timesteps that the gates of one timestep see.
        output_gate: True for fo-pooling, False for f-pooling.
        use_cuda: Accepted for old code: the kernel is chosen by the input's device.
        bias: Whether the gates have a bias.
        zoneout_rule: "salesforce" scales f by 1 - p when evaluating; "fastai" scales the kept gates
            by 1 / (1 - p) in training instead.
        weight_drop: Share of the weight's entries dropped in training (DropConnect). The state dict
            always holds the true weight.
        reverse: Run each sequence from its last timestep to its first.
        device: Where the weights are made.
        dtype: Type of the weights.

    Raises:
        ConfigError: A setting is out of range.
    """

    # The remembered inputs belong to one caller: never to a state dict, never to an exported file.
    __jit_ignored_attributes__ = ("previous_inputs", "layer_config")
    previous_inputs: Tensor | None
    # A constant, so that a scripted layer holds the one way of pooling that it uses. Set while a
    # file is exported that any libtorch can load, which has neither our operators nor training.
    __constants__ = ("in_plain_operators",)
    in_plain_operators: bool = False

    def __init__(  # noqa: PLR0913  (the order is that of the salesforce class)
        self,
        input_size: int,
        hidden_size: int | None = None,
        save_prev_x: bool = False,
        zoneout: float = 0.0,
        window: int = 1,
        output_gate: bool = True,
        use_cuda: bool | None = None,
        *,
        bias: bool = True,
        zoneout_rule: ZoneoutRule = "salesforce",
        weight_drop: float = 0.0,
        reverse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if zoneout_rule not in ("salesforce", "fastai"):
            raise ConfigError(f"zoneout_rule: expected salesforce or fastai, got {zoneout_rule!r}")
        if input_size < 1:
            raise ConfigError(f"input_size: expected at least 1, got {input_size}")
        if not 0 <= weight_drop < 1:
            raise ConfigError(f"weight_drop: expected 0 to below 1, got {weight_drop}")
        self.layer_config = LayerConfig(
            hidden_size=input_size if hidden_size is None else hidden_size,
            window=window,
            output_gate=output_gate,
            zoneout=float(zoneout),
        )
        self.input_size = input_size
        self.hidden_size = self.layer_config.hidden_size
        self.window = window
        self.output_gate = output_gate
        self.zoneout = float(zoneout)
        self.zoneout_rule: ZoneoutRule = zoneout_rule
        self.weight_drop = float(weight_drop)
        self.reverse = reverse
        self.has_bias = bias
        self.save_prev_x = save_prev_x
        self.use_cuda = use_cuda
        self.previous_inputs = None
        rows = self.layer_config.gates * self.hidden_size
        self.linear = nn.Linear(window * input_size, rows, bias=bias, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        """The settings that the linear's own line does not show."""
        return (
            f"{self.input_size}, {self.hidden_size}, window={self.window}, "
            f"output_gate={self.output_gate}, zoneout={self.zoneout}, reverse={self.reverse}"
        )

    def forward(
        self, input: Tensor, hidden: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        The annotations are those of the scripted form, which takes a batch of plain tensors. Eager
        calls take all that is said here.

        Args:
            input: [T, B, I], one unbatched sequence [T, I], or a PackedSequence.
            hidden: Cell state before the first timestep, [B, H] or [1, B, H] ([H] or [1, H] when
                unbatched); None is zeros.
            lengths: Timesteps of each row, [B], when they differ.

        Returns:
            The output in the form of the input, and the cell state after each row's last timestep,
            [1, B, H] ([1, H] when unbatched). Outputs at padded timesteps are exactly 0.

        Raises:
            InputError: A rank, size or device does not fit.
            DTypeError: A dtype does not fit.
        """
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]  (documented by torch)
            return self._forward_scripted(input, hidden, lengths)
        else:  # noqa: RET505  (TorchScript skips the branch only when it is written out)
            return self._forward_eager(input, hidden, lengths)

    def _forward_eager(
        self,
        input: Tensor | PackedSequence,
        hidden: Tensor | None,
        lengths: Tensor | Sequence[int] | None,
    ) -> tuple[Any, Tensor]:
        check_input(input, self.input_size, self.linear.weight)
        warn_if_use_cuda_contradicts(self, self.linear.weight)
        arranged = arrange(input, lengths, batch_first=False)
        unbatched = isinstance(input, Tensor) and input.dim() == 2
        cell = self._initial_cell(hidden, arranged.batch, unbatched)
        previous = self.recall(arranged.batch)
        output, cell, previous = self.run(
            arranged.values, arranged.offsets, cell, previous, arranged.longest
        )
        self.remember(previous)
        return arranged.restore(output), cell if unbatched else cell.unsqueeze(0)

    def _forward_scripted(
        self, input: Tensor, hidden: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if input.dim() != 3 or input.size(2) != self.input_size:
            raise InputError(
                f"input: a scripted QRNNLayer takes [time, batch, {self.input_size}], "
                f"got shape {list(input.shape)}"
            )
        if self.save_prev_x and self.window > 1:
            raise InputError("save_prev_x: a scripted QRNNLayer keeps nothing between calls")
        batch = input.size(1)
        cell = input.new_zeros([batch, self.hidden_size])
        if hidden is not None:
            if list(hidden.shape)[-2:] != [batch, self.hidden_size]:
                raise InputError(
                    f"hidden: expected [{batch}, {self.hidden_size}], got {list(hidden.shape)}"
                )
            cell = hidden.reshape([batch, self.hidden_size])
        previous = input.new_zeros([batch, self.window - 1, self.input_size])
        if lengths is None:
            output, cell, previous = self.run(input, None, cell, previous)
            return output, cell.unsqueeze(0)
        values, offsets, index = pack_padded(input, lengths, False)
        output, cell, previous = self.run(values, offsets, cell, previous, input.size(0))
        return unpack_padded(output, index, input.size(0), batch), cell.unsqueeze(0)

    def run(
        self,
        values: Tensor,
        offsets: Tensor | None,
        cell: Tensor | None,
        previous: Tensor,
        longest: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer on dense or packed input. Can be scripted.

        Args:
            values: [T, B, I], or packed [N, I] with `offsets`.
            offsets: [B + 1] int32 or int64, from 0 to N, on the same device; None for dense input.
            cell: Cell state before the first timestep, [B, H]; None is zeros of the gates' dtype.
            previous: The window - 1 inputs before the first timestep, oldest first,
                [B, window - 1, I], or [B, 0] for zeros; not read with window 1.
            longest: Timesteps of the longest packed sequence, or a bound, if the caller knows
                them without asking a GPU; else 0. It lets the layer choose its `kernels`.

        Returns:
            Output [T, B, H] or [N, H], and cell and previous as the next timestep would need them,
            in the dtypes of `cell` and `previous`: under autocast the state stays in float32.
        """
        # TorchScript leaves out the branch only when the condition stands alone.
        if not torch.jit.is_scripting():  # noqa: SIM102  # pyright: ignore[reportPrivateImportUsage]
            if values.is_cuda and self.kernels(values, offsets, cell, longest).plan is not None:
                return self._run_one_kernel(values, offsets, cell, previous, longest)
        columns, carried = window_columns(values, offsets, previous, self.window, self.reverse)
        if self.training and self.weight_drop > 0.0:
            weight = F.dropout(self.linear.weight, self.weight_drop, True)
            gates = F.linear(columns, weight, self.linear.bias)
        else:
            gates = self.linear(columns)
        output_dtype = gates.dtype
        if cell is not None:
            gates = cast(gates, cell.dtype)
        if self.in_plain_operators:
            before = self._cell_or_zeros(cell, gates, offsets)
            output, last = self._pool_in_plain_operators(gates, offsets, before)
        elif self.training and self.zoneout > 0.0:
            before = self._cell_or_zeros(cell, gates, offsets)
            output, last = self._pool_with_dropped_gates(gates, offsets, before)
        else:
            zoneout = self._zoneout_of_inference()
            arguments = (gates, cell, offsets, self.output_gate, self.reverse, zoneout)
            if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
                output, last = torch.ops.qrnn.fo_pool(*arguments)
            else:
                output, last = fo_pool(*arguments)
        return cast(output, output_dtype), last, cast(carried, previous.dtype)

    def kernels(
        self, values: Tensor, offsets: Tensor | None, cell: Tensor | None, longest: int = 0
    ) -> cuda_layer.Choice:
        """Which kernels `run` uses for this call, and why; `str()` of it is for people.

        Args:
            values: As in `run`.
            offsets: As in `run`.
            cell: As in `run`.
            longest: As in `run`.
        """
        if torch.compiler.is_compiling():
            return cuda_layer.Choice(None, "a compiled graph holds two")
        if self.training:
            return cuda_layer.Choice(None, "one has no gradient, and the layer is in training")
        if not self.output_gate:
            return cuda_layer.Choice(None, "one is for layers with an output gate")
        linear = self.linear
        if type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks:
            return cuda_layer.Choice(None, "the linear module is parametrized, or has hooks")
        return cuda_layer.choose(values, self.linear.weight, cell, offsets, longest)

    def _run_one_kernel(
        self,
        values: Tensor,
        offsets: Tensor | None,
        cell: Tensor | None,
        previous: Tensor,
        longest: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        before = previous.to(values.dtype)
        given = self.window > 1 and before.shape[1] > 0
        output, cell = linear_fo_pool(
            values,
            self.linear.weight,
            self.linear.bias,
            cell,
            offsets,
            before if given else None,
            self.reverse,
            self._zoneout_of_inference(),
            longest,
        )
        carried = window_carried(values, offsets, before, self.window, self.reverse)
        return output, cell, carried.to(previous.dtype)

    def _cell_or_zeros(self, cell: Tensor | None, gates: Tensor, offsets: Tensor | None) -> Tensor:
        if cell is not None:
            return cell
        batch = gates.size(1) if offsets is None else offsets.size(0) - 1
        return gates.new_zeros([batch, self.hidden_size])

    def _zoneout_of_inference(self) -> float:
        # The fastai rule has done its scaling in training.
        return self.zoneout if self.zoneout_rule == "salesforce" else 0.0

    def _pool_with_dropped_gates(
        self, gates: Tensor, offsets: Tensor | None, cell: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = torch.split(gates, self.hidden_size, dim=-1)
        keep = 1.0 - self.zoneout
        mask = torch.empty_like(parts[1]).bernoulli_(keep)
        if self.zoneout_rule == "fastai" and keep > 0.0:
            mask = mask / keep
        forget = torch.sigmoid(parts[1]) * mask
        cells = torch.ops.qrnn.forget_mult(
            forget, torch.tanh(parts[0]), cell, offsets, self.reverse
        )
        last = last_cells(cells, offsets, cell, self.reverse)
        return torch.sigmoid(parts[2]) * cells if self.output_gate else cells, last

    def _pool_in_plain_operators(
        self, gates: Tensor, offsets: Tensor | None, cell: Tensor
    ) -> tuple[Tensor, Tensor]:
        # As the kernels do, half precision is computed in float32 and rounded once.
        wide = torch.promote_types(gates.dtype, torch.float32)
        parts = torch.split(cast(gates, wide), self.hidden_size, dim=-1)
        before = cast(cell, wide)
        forget = torch.sigmoid(parts[1]) * (1.0 - self._zoneout_of_inference())
        cells = portable.forget_mult(forget, torch.tanh(parts[0]), before, offsets, self.reverse)
        last = last_cells(cells, offsets, before, self.reverse)
        output = torch.sigmoid(parts[2]) * cells if self.output_gate else cells
        return output, cast(last, cell.dtype)

    def reset(self) -> None:
        """Forget the inputs kept by `save_prev_x`."""
        self.previous_inputs = None

    def recall(self, batch: int) -> Tensor:
        """The remembered inputs [B, window - 1, I], or [B, 0], which stands for zeros.

        Raises:
            InputError: They were remembered for another batch size.
        """
        remembered = self.previous_inputs
        if remembered is None:
            return self.linear.weight.new_empty(batch, 0)
        if remembered.shape[0] != batch:
            raise InputError(
                f"save_prev_x: the last call had batch size {remembered.shape[0]} and this one has "
                f"{batch}; call reset() before sequences that do not continue the last ones"
            )
        return remembered.to(self.linear.weight)

    def remember(self, previous: Tensor) -> None:
        """Keep the inputs for the next call, if `save_prev_x` says so.

        Raises:
            InputError: Called in a DataParallel replica, which is thrown away after the call.
        """
        if not self.save_prev_x or self.window == 1:
            return
        if getattr(self, "_is_replica", False):
            raise InputError(
                "save_prev_x: a DataParallel replica cannot remember inputs for the next call; "
                "carry a QRNNState instead (QRNN.initial_state)"
            )
        self.previous_inputs = previous.detach()

    def _initial_cell(self, hidden: Tensor | None, batch: int, unbatched: bool) -> Tensor | None:
        weight = self.linear.weight
        if hidden is None:
            # Under autocast the gates are not in the dtype of the state.
            return weight.new_zeros(batch, self.hidden_size) if autocast_is_on(weight) else None
        check_like_weights("hidden", hidden, weight)
        shapes = [(batch, self.hidden_size), (1, batch, self.hidden_size)]
        if unbatched:
            shapes = [(self.hidden_size,), (1, self.hidden_size)]
        if hidden.shape not in shapes:
            raise InputError(
                f"hidden: expected {' or '.join(str(list(s)) for s in shapes)}, "
                f"got {list(hidden.shape)}"
            )
        return hidden.reshape(batch, self.hidden_size).to(weight.dtype)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, at no cost when it has that dtype already. Can be scripted."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
