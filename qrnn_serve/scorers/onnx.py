"""The ONNX engine: a file of qrnn-export in ONNX Runtime, with our custom operator.

The graph takes padded batches, so packed rows are grouped by length; padding changes no score.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch

from qrnn_serve import onnx_ops_library
from qrnn_serve.core.errors import ArtefactError, ConfigError
from qrnn_serve.core.manifest import MANIFEST_KEY
from qrnn_serve.core.proof_file import ProofFile
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows, StageFacts, StageTimes
from qrnn_serve.scorers.grouping import PaddedGroup, group_by_length
from qrnn_serve.scorers.schema import manifest_config, manifest_schema, read_manifest
from qrnn_serve.scorers.torch_scorer import device_max_timesteps, find_device

_CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_ERRORS_ONLY = 3


class OnnxScorer:
    """A Scorer over an ONNX Runtime session."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        schema: ModelSchema,
        *,
        device: str,
        max_timesteps: int,
    ) -> None:
        self._session: onnxruntime.InferenceSession | None = session
        self.schema = schema
        self.device = device
        self.engine = "onnx"
        self.max_timesteps = max_timesteps
        self.alive = True
        self.stages: tuple[StageFacts, ...] = ()

    def score(self, rows: PackedRows) -> ScoredRows:
        """Run the model on rows that were validated against the schema.

        Raises:
            MemoryError: There is no room for the batch.
        """
        schema = self.schema
        vectors = rows.timesteps if schema.output_per_timestep else rows.rows
        output = np.empty((vectors, schema.output_size), schema.dtype)
        state = np.empty((rows.rows, schema.state_size), schema.dtype)
        padding, times = 0, StageTimes()
        for group in group_by_length(rows.lengths):
            started_s = time.monotonic()
            feeds = _feeds(rows, group)
            padded_s = time.monotonic()
            group_output, state[group.rows] = self._run(feeds)
            scored_s = time.monotonic()
            if schema.output_per_timestep:
                output[group.positions[group.real]] = group_output[group.real]
            else:
                output[group.rows] = group_output
            padding += group.padding
            times += StageTimes(
                upload_s=padded_s - started_s,
                compute_s=scored_s - padded_s,
                download_s=time.monotonic() - scored_s,
            )
        return ScoredRows(output=output, state=state, padded_timesteps=padding, times=times)

    def interrupt(self) -> bool:
        """A thread in native code cannot be ended."""
        return False

    def close(self) -> None:
        """Let go of the session and its memory."""
        self._session = None

    def _run(
        self, feeds: dict[str, npt.NDArray[np.generic]]
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        if self._session is None:
            raise RuntimeError("a closed scorer was used. This is a bug.")
        with _memory_errors():
            output, state = self._session.run([self.schema.output_name, "state_out"], feeds)
        return np.asarray(output), np.asarray(state)


def _feeds(rows: PackedRows, group: PaddedGroup) -> dict[str, npt.NDArray[np.generic]]:
    feeds = {"input": group.padded(rows.values), "lengths": group.lengths}
    if rows.state is not None:
        feeds["state"] = rows.state[group.rows]
    return feeds


def load_onnx(path: Path, device_name: str, threads: int, proof: ProofFile | None) -> OnnxScorer:
    """Load an ONNX file of qrnn-export.

    Args:
        path: The file; one with external data needs that beside it.
        device_name: "cpu" or "cuda:N"; a GPU needs onnxruntime-gpu.
        threads: Threads of the session.
        proof: The file's proof; None takes a file that is not proven.

    Raises:
        ConfigError: The device is not there, or this ONNX Runtime cannot use it.
        ArtefactError: The file is damaged or not one of ours.
        KernelError: The library with the operator is missing.
    """
    device = find_device(device_name)
    session = _open(path, device, threads)
    manifest = read_manifest(_metadata(session).get(MANIFEST_KEY), path, "onnx", proof)
    schema = manifest_schema(manifest, path)
    _check_graph(session, schema, path)
    config = manifest_config(manifest, path)
    most = device_max_timesteps(config, schema.dtype, device)
    return OnnxScorer(session, schema, device=str(device), max_timesteps=most)


def _open(path: Path, device: torch.device, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _ERRORS_ONLY
    options.register_custom_ops_library(onnx_ops_library())
    providers = _providers(device)
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # ONNX Runtime has an error class a status, and no base of them
        raise ArtefactError(f"{path}: ONNX Runtime cannot load it: {_first_line(error)}") from error
    # A provider whose libraries do not load is left out by the runtime with no more than a message.
    expected, used = _CUDA if device.type == "cuda" else _CPU, session.get_providers()
    if used[0] != expected:
        raise ConfigError(
            f"{path}: expected to run on {expected}, but ONNX Runtime uses {used[0]}; its log says "
            "which of CUDA's libraries it did not find"
        )
    return session


def _providers(device: torch.device) -> list[Any]:
    if device.type == "cpu":
        return [_CPU]
    if _CUDA not in onnxruntime.get_available_providers():
        raise ConfigError(
            f"device: {device} needs ONNX Runtime for CUDA, and onnxruntime "
            f"{onnxruntime.__version__} is for {onnxruntime.get_device()}; install "
            "onnxruntime-gpu in its place, or serve the TorchScript file or the checkpoint"
        )
    # The settings of the matrix products are those of torch: no TensorFloat32.
    return [(_CUDA, {"device_id": str(device.index), "use_tf32": "0"}), _CPU]


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
    if schema.input_size:
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
