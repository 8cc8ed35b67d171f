"""What a model takes and gives, from its configuration or its manifest."""

from __future__ import annotations

from pathlib import Path

from qrnn_serve.core.config import from_mapping
from qrnn_serve.core.errors import ArtefactError, ConfigError
from qrnn_serve.core.manifest import ArtefactKind, Manifest
from qrnn_serve.core.proof_file import ProofFile, check_measured
from qrnn_serve.engine.types import ModelSchema
from qrnn_serve.model.config import SequenceModelConfig

SERVED_DTYPES = ("float32", "float16", "float64")
"""numpy has no bfloat16, and the wire has no other form of it yet."""


def schema_of(
    config: SequenceModelConfig, *, dtype: str, state_size: int, weights_sha256: str
) -> ModelSchema:
    """The schema of a model with that configuration.

    Raises:
        ConfigError: Its dtype cannot be served.
    """
    if dtype not in SERVED_DTYPES:
        raise ConfigError(f"model dtype: expected one of {SERVED_DTYPES}, got {dtype!r}")
    return ModelSchema(
        takes_ids=config.takes_ids,
        input_size=sum(config.timestep_shape),
        vocabulary_size=config.vocabulary_size or 0,
        dtype=dtype,
        output_name=config.output_name,
        output_size=config.output_size,
        output_per_timestep=config.pooling == "none",
        state_size=state_size,
        weights_sha256=weights_sha256,
        cuts_in_time=config.qrnn.bidirectional == "no" and config.pooling in {"none", "last"},
    )


def read_manifest(
    text: str | bytes | None, path: Path, kind: ArtefactKind, proof: ProofFile | None
) -> Manifest:
    """The manifest of an artefact of the expected kind, and with the expected proof if given.

    Raises:
        ArtefactError: There is none, it cannot be read, it is of another kind, or it does not name
            that proof.
    """
    if not text:
        raise ArtefactError(
            f"{path}: has no manifest, so it was not written by qrnn-export; "
            "export the model's checkpoint with `qrnn-export MODEL.pt`"
        )
    manifest = Manifest.from_json(text, str(path))
    if manifest.kind != kind:
        raise ArtefactError(f"{path}: expected a {kind} file, its manifest says {manifest.kind}")
    if proof is not None:
        check_measured(proof, manifest.proof_sha256, path)
    return manifest


def manifest_config(manifest: Manifest, path: Path) -> SequenceModelConfig:
    """The model's configuration.

    Raises:
        ArtefactError: The manifest holds another thing there.
    """
    try:
        return from_mapping(SequenceModelConfig, manifest.config, f"{path} manifest.config")
    except ConfigError as error:
        raise ArtefactError(str(error)) from error


def manifest_schema(manifest: Manifest, path: Path) -> ModelSchema:
    """The schema of an artefact, from its manifest alone.

    Raises:
        ArtefactError: Its parts contradict each other.
        ConfigError: Its dtype cannot be served.
    """
    config = manifest_config(manifest, path)
    outputs = {spec.name: spec for spec in manifest.outputs}
    output = outputs.get(config.output_name)
    state = outputs.get("state_out")
    if output is None or state is None:
        raise ArtefactError(
            f"{path}: expected outputs {config.output_name!r} and 'state_out', "
            f"its manifest has {sorted(outputs)}"
        )
    if state.shape[-1] != manifest.state_size or output.shape[-1] != config.output_size:
        raise ArtefactError(
            f"{path}: the manifest contradicts itself: outputs of width {output.shape[-1]} and "
            f"{state.shape[-1]}, configuration and state layout say {config.output_size} and "
            f"{manifest.state_size}"
        )
    return schema_of(
        config,
        dtype=output.dtype,
        state_size=manifest.state_size,
        weights_sha256=manifest.weights_sha256,
    )
