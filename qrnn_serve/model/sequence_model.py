"""The model that is trained, exported and served: embedding, QRNN, pooling, head.

Batch-major, without memory between calls, and scriptable: what a caller must carry from one chunk
of a sequence to the next is one tensor, laid out by `state.state_layout`.

Letters: B rows, T timesteps, N timesteps of all rows laid end to end, I input width, K ids of a
timestep, C output width, S state width.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qrnn_serve.core.errors import DTypeError, InputError
from qrnn_serve.model.activation import activate
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.model.packing import check_offsets, pack_padded, unpack_padded
from qrnn_serve.model.pooling import pool_packed
from qrnn_serve.model.scripting import autocast_is_on, dtype_name, values_can_be_read
from qrnn_serve.model.stack import QRNN
from qrnn_serve.model.state import join_state, split_state, state_widths


class SequenceModel(nn.Module):
    """Token ids or features in; one vector a timestep or a row out.

    Args:
        config: Everything that changes a number.
        device: Where the weights are made.
        dtype: Type of the weights, and of features, outputs and state.

    Attributes:
        float32_edges: Features, outputs and state are float32 whatever the type of the weights, and
            are converted inside: numpy, ONNX Runtime and the wire have no bfloat16.
    """

    __jit_ignored_attributes__ = ("_config",)
    __jit_unused_properties__ = ("config",)

    def __init__(
        self,
        config: SequenceModelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self.float32_edges = False
        self.takes_ids = config.takes_ids
        self.input_size = config.qrnn.input_size
        self.vocabulary_size = config.vocabulary_size or 0
        self.ids_per_timestep = config.ids_per_timestep
        self.padding_id = config.padding_id
        self.input_activation: str = config.input_activation
        self.pooling: str = config.pooling
        self.pooled_activation: str = config.pooled_activation
        self.output_activation: str = config.output_activation
        self.state_widths = state_widths(config.qrnn)
        self.state_size = sum(self.state_widths)
        self.embedding = None
        if config.vocabulary_size is not None:
            sizes = (config.vocabulary_size, config.qrnn.input_size)
            table = torch.empty(sizes, device=device, dtype=dtype)
            self.embedding = nn.Embedding.from_pretrained(
                table, freeze=False, padding_idx=config.padding_id
            )
            # Without memory there is nothing to draw, and torch would import its compiler for it.
            if not table.is_meta:
                self.embedding.reset_parameters()
        self.qrnn = QRNN.from_config(config.qrnn, device=device, dtype=dtype)
        widths = (config.pooled_size, *config.head_hidden_sizes)
        self.head_hidden = nn.ModuleList(
            nn.Linear(*sizes, device=device, dtype=dtype) for sizes in pairwise(widths)
        )
        self.head = None
        if config.head_size is not None:
            self.head = nn.Linear(
                widths[-1], config.head_size, config.head_bias, device=device, dtype=dtype
            )

    @property
    def config(self) -> SequenceModelConfig:
        """Everything about the model that changes a number, as data."""
        return self._config

    def forward(
        self, input: Tensor, lengths: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score a padded batch.

        Args:
            input: Features [B, T, I] in the dtype of the weights, or ids int64, [B, T] or, with
                several a timestep, [B, T, K]. Padded timesteps are neither read nor computed: they
                may hold anything.
            lengths: [B] integers from 0 to T; None when every row has T timesteps. Best on the CPU:
                reading them from a GPU waits for it.
            state: [B, S], what an earlier call returned; None for rows that begin.

        Returns:
            The output, [B, T, C] without pooling (padded timesteps exactly 0), else [B, C]; and the
            state after each row's last timestep, [B, S].

        Raises:
            InputError: A rank, size, length, id or device does not fit.
            DTypeError: A dtype does not fit.
        """
        self._check_input(input, 2)
        batch, timesteps = input.size(0), input.size(1)
        if lengths is None:
            offsets = torch.arange(batch + 1, device=input.device) * timesteps
            output, state_out = self._score(input.flatten(0, 1), offsets, state, timesteps)
            if self.pooling == "none":
                output = output.view([batch, timesteps, output.size(1)])
            return output, state_out
        values, offsets, index = pack_padded(input, lengths, True)
        output, state_out = self._score(values, offsets, state, timesteps)
        if self.pooling == "none":
            output = unpack_padded(output, index, batch, timesteps)
        return output, state_out

    @torch.jit.export
    def forward_packed(
        self, values: Tensor, offsets: Tensor, state: Tensor | None = None, longest: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Score rows laid end to end.

        On a GPU nothing here waits for the stream, so the call can be captured in a CUDA graph; in
        return the values of ids and offsets cannot be checked there, which is the caller's to do.

        Args:
            values: Features [N, I] in the dtype of the weights, or ids int64, [N] or [N, K].
            offsets: [B + 1] int64, from 0 to N, on the same device.
            state: [B, S], what an earlier call returned; None for rows that begin.
            longest: Timesteps of the longest row, or a bound, if known; 0 if not. It lets the
                layers choose their kernels (`QRNNLayer.kernels`).

        Returns:
            The output, [N, C] without pooling, else [B, C]; and the state after each row's last
            timestep, [B, S].

        Raises:
            InputError: A rank, size, id, offset or device does not fit.
            DTypeError: A dtype does not fit.
        """
        self._check_input(values, 1)
        check_offsets(offsets, values)
        return self._score(values, offsets, state, longest)

    def _score(
        self, values: Tensor, offsets: Tensor, state: Tensor | None, longest: int
    ) -> tuple[Tensor, Tensor]:
        batch = offsets.size(0) - 1
        carried = self._checked_state(state, batch)
        if self.embedding is not None:
            self._check_ids(values)
            if self.ids_per_timestep == 1:
                values = self.embedding(values)
            else:
                values = F.embedding_bag(
                    values, self.embedding.weight, mode="sum", padding_idx=self.padding_id
                )
        if self.float32_edges:
            inside = self._weight().dtype
            values, carried = values.to(inside), carried.to(inside)
        values = activate(values, self.input_activation)
        cells, inputs = split_state(carried, self.state_widths)
        output, cells, inputs = self.qrnn.run(values, offsets, cells, inputs, longest)
        if self.pooling != "none":
            output = pool_packed(output, offsets, self.pooling, self.qrnn.num_directions)
        output = activate(output, self.pooled_activation)
        for layer in self.head_hidden:
            output = F.relu(layer(output))
        if self.head is not None:
            output = self.head(output)
        output = activate(output, self.output_activation)
        new_state = join_state(cells, inputs)
        if self.float32_edges:
            return output.to(torch.float32), new_state.to(torch.float32)
        return output, new_state

    def edge_dtype(self) -> torch.dtype:
        """The dtype of features, outputs and state."""
        return torch.float32 if self.float32_edges else self._weight().dtype

    def _weight(self) -> Tensor:
        """A tensor on the device and of the float type of the layers: scales of int8 weights."""
        linear = self.qrnn.layers[0].linear
        # TorchScript decides it while compiling, and leaves the other branch out.
        if hasattr(linear, "scale"):
            return linear.scale
        else:  # noqa: RET505  (TorchScript skips the branch only when it is written out)
            return linear.weight

    def _checked_state(self, state: Tensor | None, batch: int) -> Tensor:
        weight = self._weight()
        edge = self.edge_dtype()
        if state is None:
            return weight.new_zeros([batch, self.state_size], dtype=edge)
        if state.dim() != 2 or state.size(0) != batch or state.size(1) != self.state_size:
            raise InputError(
                f"state: expected [batch, state] = [{batch}, {self.state_size}], "
                f"got {list(state.shape)}"
            )
        if state.dtype != edge or state.device != weight.device:
            raise DTypeError(
                f"state: expected {dtype_name(edge)} on {weight.device} like the model, "
                f"got {dtype_name(state.dtype)} on {state.device}"
            )
        return state

    def _check_input(self, input: Tensor, leading_axes: int) -> None:
        weight = self._weight()
        edge = self.edge_dtype()
        axes = "[batch, time" if leading_axes == 2 else "[timesteps"
        if self.takes_ids:
            several = self.ids_per_timestep > 1
            if input.dim() != leading_axes + int(several) or (
                several and input.size(-1) != self.ids_per_timestep
            ):
                end = f", {self.ids_per_timestep}" if several else ""
                raise InputError(f"input: expected ids {axes}{end}], got shape {list(input.shape)}")
            if input.dtype != torch.int64:
                raise DTypeError(f"input: expected int64 ids, got {dtype_name(input.dtype)}")
        else:
            if input.dim() != leading_axes + 1 or input.size(-1) != self.input_size:
                raise InputError(
                    f"input: expected features {axes}, {self.input_size}], "
                    f"got shape {list(input.shape)}"
                )
            castable = autocast_is_on(input) and input.is_floating_point()
            if input.dtype != edge and not castable:
                raise DTypeError(
                    f"input: expected {dtype_name(edge)} like the model, "
                    f"got {dtype_name(input.dtype)}"
                )
        if input.device != weight.device:
            raise InputError(
                f"input: it is on {input.device} and the model on {weight.device}; "
                "move one of them with .to(device)"
            )

    def _check_ids(self, ids: Tensor) -> None:
        if ids.numel() == 0 or not values_can_be_read(ids):
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocabulary_size:
            raise InputError(
                f"input: expected ids from 0 to {self.vocabulary_size - 1}, got {low} to {high}"
            )
