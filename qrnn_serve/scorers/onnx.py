"""The ONNX engine: a file of qrnn-export in ONNX Runtime, with our custom operator.

The graph takes padded batches, so packed rows are grouped by length; padding changes no score.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from qrnn_serve.core.errors import ArtefactError, ConfigError
from qrnn_serve.core.manifest import MANIFEST_KEY
from qrnn_serve.core.proof_file import ProofFile
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows
from qrnn_serve.kernels.library import native_library
from qrnn_serve.scorers import memory
from qrnn_serve.scorers.grouping import PaddedGroup, group_by_length
from qrnn_serve.scorers.schema import manifest_config, manifest_schema, read_manifest

_PROVIDER = "CPUExecutionProvider"
_ERRORS_ONLY = 3


class OnnxScorer:
    """A Scorer over an ONNX Runtime session."""

    def __init__(
        self, session: onnxruntime.InferenceSession, schema: ModelSchema, *, max_timesteps: int
    ) -> None:
        self._session: onnxruntime.InferenceSession | None = session
        self.schema = schema
        self.device = "cpu"
        self.engine = "onnx"
        self.max_timesteps = max_timesteps
        self.alive = True

    def score(self, rows: PackedRows) -> ScoredRows:
        """Run the model on rows that were validated against the schema.

        Raises:
            MemoryError: There is no room for the batch.
        """
        schema = self.schema
        vectors = rows.timesteps if schema.output_per_timestep else rows.rows
        output = np.empty((vectors, schema.output_size), schema.dtype)
        state = np.empty((rows.rows, schema.state_size), schema.dtype)
        padding = 0
        for group in group_by_length(rows.lengths):
            group_output, state[group.rows] = self._run(rows, group)
            if schema.output_per_timestep:
                output[group.positions[group.real]] = group_output[group.real]
            else:
                output[group.rows] = group_output
            padding += group.padding
        return ScoredRows(output=output, state=state, padded_timesteps=padding)

    def interrupt(self) -> bool:
        """A thread in native code cannot be ended."""
        return False

    def close(self) -> None:
        """Let go of the session and its memory."""
        self._session = None

    def _run(
        self, rows: PackedRows, group: PaddedGroup
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        if self._session is None:
            raise RuntimeError("a closed scorer was used. This is a bug.")
        feeds: dict[str, npt.NDArray[np.generic]] = {
            "input": group.padded(rows.values),
            "lengths": group.lengths,
        }
        if rows.state is not None:
            feeds["state"] = rows.state[group.rows]
        with _memory_errors():
            output, state = self._session.run([self.schema.output_name, "state_out"], feeds)
        return np.asarray(output), np.asarray(state)


def load_onnx(path: Path, device: str, threads: int, proof: ProofFile | None) -> OnnxScorer:
    """Load an ONNX file of qrnn-export.

    Args:
        path: The file; one with external data needs that beside it.
        device: "cpu".
        threads: Threads of the session.
        proof: The file's proof; None takes a file that is not proven.

    Raises:
        ConfigError: Another device: the operator has no GPU kernel in ONNX Runtime.
        ArtefactError: The file is damaged or not one of ours.
        KernelError: The library with the operator is missing.
    """
    if device != "cpu":
        raise ConfigError(
            f"device: the onnx engine runs on cpu, got {device!r}; to score on a GPU serve the "
            "TorchScript file or the checkpoint"
        )
    session = _open(path, threads)
    manifest = read_manifest(_metadata(session).get(MANIFEST_KEY), path, "onnx", proof)
    schema = manifest_schema(manifest, path)
    _check_graph(session, schema, path)
    config = manifest_config(manifest, path)
    most = memory.most_timesteps(config, schema.dtype, memory.free_host_bytes())
    return OnnxScorer(session, schema, max_timesteps=most)


def _open(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _ERRORS_ONLY
    options.register_custom_ops_library(str(native_library()))
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=[_PROVIDER])
    except Exception as error:  # ONNX Runtime has an error class a status, and no base of them
        raise ArtefactError(f"{path}: ONNX Runtime cannot load it: {_first_line(error)}") from error
    if session.get_providers()[0] != _PROVIDER:
        raise ConfigError(f"{path}: expected to run on {_PROVIDER}, got {session.get_providers()}")
    return session


def _metadata(session: onnxruntime.InferenceSession) -> dict[str, str]:
    return session.get_modelmeta().custom_metadata_map


def _check_graph(session: onnxruntime.InferenceSession, schema: ModelSchema, path: Path) -> None:
    """Compare the graph's names and widths with the manifest."""
    inputs: dict[str, Any] = {i.name: i for i in session.get_inputs()}
    optional: dict[str, Any] = {i.name: i for i in session.get_overridable_initializers()}
    outputs: dict[str, Any] = {o.name: o for o in session.get_outputs()}
    names = {"input", "lengths", "state", schema.output_name, "state_out"}
    if missing := names - inputs.keys() - optional.keys() - outputs.keys():
        raise ArtefactError(
            f"{path}: the graph has no {sorted(missing)}, which its manifest promises"
        )
    widths = [outputs["state_out"].shape[-1], outputs[schema.output_name].shape[-1]]
    expected = [schema.state_size, schema.output_size]
    if not schema.takes_ids:
        widths.append(inputs["input"].shape[-1])
        expected.append(schema.input_size)
    if widths != expected:
        raise ArtefactError(
            f"{path}: state, output and input are {widths} wide in the graph, {expected} in its "
            "manifest"
        )


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """ONNX Runtime's allocation failures, which have no class of their own, as MemoryError."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if "bad_alloc" not in text and "Failed to allocate memory" not in text:
            raise
        raise MemoryError(f"out of memory: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
