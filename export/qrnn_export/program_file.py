"""Writes a SequenceModel as a torch.export program (.pt2), and compiles one with AOTInductor.

The graph calls qrnn::fo_pool, so the process that loads it must `import qrnn_serve.kernels`.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from qrnn_export.archive_file import set_manifest, write_archive
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.manifest import Manifest
from qrnn_serve.model.checkpoint import alone
from qrnn_serve.model.packing import offsets_from_lengths, padded_index
from qrnn_serve.model.precision import empty_model, precision_of
from qrnn_serve.model.sequence_model import SequenceModel

NOTICE = (
    "A process that loads the .pt2 file must `import qrnn_serve.kernels` first; then "
    "torch.export.load(path).module()(input, lengths, state). A state of zeros is no state."
)
"""Said once for each export."""
AOT_NOTICE = (
    "The .aot.pt2 file is machine code for the kind of CPU that compiled it: "
    "import qrnn_serve.kernels, then torch._inductor.aoti_load_package(path)(input, lengths, "
    "state). Loading it runs that code."
)
"""Said of a compiled program."""

_EXAMPLE_ROWS = 3
_EXAMPLE_TIMESTEPS = 7


class PaddedProgram(SequenceModel):
    """The model with the one signature of an exported graph: padded rows, lengths and state.

    The graph packs the rows, as the module does, so that padding costs nothing. How many timesteps
    they have together is known only while it runs.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (a graph has no optional input)
        self, input: Tensor, lengths: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `SequenceModel.forward`, all arguments given, any B and T of at least 0.

        Args:
            input: [B, T, I], or ids [B, T].
            lengths: [B] int64.
            state: [B, S]; zeros for rows that begin.
        """
        batch, timesteps = input.size(0), input.size(1)
        torch._check(lengths.size(0) == batch)
        torch._check(state.size(0) == batch)
        fits = (lengths >= 0) & (lengths <= timesteps)
        said = "lengths: expected 0 to the timesteps of the input"
        torch.ops.aten._assert_async.msg(fits.all(), said)
        total: Any = lengths.sum().item()
        offsets = offsets_from_lengths(lengths)
        index = padded_index(offsets, total, timesteps, 1)
        values = input.flatten(0, 1).index_select(0, index)
        # A row of one timestep more, taken off again below: a graph without branches cannot look
        # whether there are none, and then some operators have nothing to read.
        values = torch.cat([values, values.new_zeros([1, *values.shape[1:]])])
        offsets = torch.cat([offsets, offsets[-1:] + 1])
        state = torch.cat([state, state.new_zeros([1, state.size(1)])])
        output, state_out = self._score(values, offsets, state, 0)
        state_out = state_out.narrow(0, 0, batch)
        if self.pooling != "none":
            return output.narrow(0, 0, batch), state_out
        padded = output.new_zeros([batch * timesteps, output.size(1)])
        padded = padded.index_copy(0, index, output.narrow(0, 0, total))
        return padded.view([batch, timesteps, output.size(1)]), state_out


def export_program(model: SequenceModel) -> ExportedProgram:
    """Trace the model with every batch and time axis of any size.

    Args:
        model: Not changed; the program shares its weights where it can.
    """
    own = empty_model(model.config, precision_of(model))
    own.float32_edges = model.float32_edges
    # torch writes all of the memory that a view lies in.
    own.load_state_dict(alone(model.state_dict()), assign=True)
    # Its class decides what is traced; names and tensors are the model's.
    traced = PaddedProgram.__new__(PaddedProgram)
    traced.__dict__.update(own.requires_grad_(False).__dict__)
    rows, axis = _EXAMPLE_ROWS, Dim.DYNAMIC
    config = model.config
    ids = torch.zeros(rows, _EXAMPLE_TIMESTEPS, dtype=torch.int64)
    if config.ids_per_timestep > 1:
        ids = ids.unsqueeze(2).repeat(1, 1, config.ids_per_timestep)
    edge = model.edge_dtype()
    features = torch.zeros(rows, _EXAMPLE_TIMESTEPS, config.qrnn.input_size, dtype=edge)
    program = torch.export.export(
        traced,
        (
            ids if config.takes_ids else features,
            torch.full((rows,), _EXAMPLE_TIMESTEPS),
            torch.zeros(rows, model.state_size, dtype=edge),
        ),
        dynamic_shapes=({0: axis, 1: axis}, {0: axis}, {0: axis}),
    )
    # The paths of our sources do not belong in a file.
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def write_program(program: ExportedProgram, path: Path, manifest: Manifest) -> None:
    """Write the program with its manifest; equal programs give equal bytes.

    Raises:
        OSError: The disk is full, or the folder cannot be written to.
    """
    # They would be stored as a pickle.
    program.example_inputs = None
    write_archive(path, lambda name: torch.export.save(program, str(name)), ".pt2")
    set_manifest(path, manifest)


def refuse_without_compiler() -> None:
    """Stop before any work when there is nothing to compile with.

    Raises:
        ConfigError: There is no C++ compiler.
    """
    wanted = os.environ.get("CXX", "g++")
    if shutil.which(wanted) is None:
        raise ConfigError(
            f"--aot: torch compiles with {wanted}, which is not on this machine's PATH. Install "
            "a C++ compiler, or name one in the variable CXX, or leave --aot out"
        )


def write_compiled(program: ExportedProgram, path: Path, manifest: Manifest) -> None:
    """Compile the program for this machine's CPU and write it, with its manifest.

    Raises:
        ConfigError: The compiler failed; the message has its last words.
        OSError: The disk is full.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import InductorError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_archive(
                path,
                lambda name: aoti_compile_and_package(program, package_path=str(name)),
                ".pt2",
            )
    except InductorError as error:
        words = "\n  ".join(str(error).strip().splitlines()[-5:])
        raise ConfigError(f"--aot: torch could not compile the model:\n  {words}") from error
    set_manifest(path, manifest)
