"""The manifest that travels inside every artefact and says what it is.

TorchScript and torch.export files hold it as the extra file MANIFEST_KEY, an ONNX file as the
metadata entry of the same name, all as JSON. The server, the checker and people read it; nothing
about a model is guessed from its tensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.errors import ArtefactError, ConfigError

FORMAT_VERSION = 1
MANIFEST_KEY = "qrnn_manifest.json"

ArtefactKind = Literal["checkpoint", "torchscript", "onnx", "pt2", "aot"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One input or output of an artefact.

    Attributes:
        name: Its name in the graph.
        dtype: numpy name, for example "float32" or "int64".
        shape: Sizes; a string names an axis that may have any size ("batch", "time").
        optional: True for an input that may be left out.
    """

    name: str
    dtype: str
    shape: tuple[Any, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSlice:
    """Where one part of the carried state lies in the columns of the `state` tensor [B, S].

    Attributes:
        layer: Layer number from the input.
        direction: "forward" or "backward".
        kind: "cell" is the last cell value [H]; "inputs" the last window - 1 inputs, oldest first,
            [(window - 1) * I] row-major.
        start: First column.
        stop: One past the last column.
    """

    layer: int
    direction: Literal["forward", "backward"]
    kind: Literal["cell", "inputs"]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What an artefact is.

    Attributes:
        kind: Which runtime the file is for.
        config: The model's SequenceModelConfig as a mapping.
        inputs: `input` and the optional `lengths` and `state`.
        outputs: `output` or `logits`, and `state_out`.
        state: Layout of the state tensor; its width is the last slice's stop.
        weights_sha256: Hash over names, dtypes, shapes and bytes of the weights.
        versions: Library name to version at export.
        parity: Largest absolute difference from the eager module per checked case.
        proof_sha256: Hash of the measurements in the proof file beside the artefact.
        notes: What was inferred or dropped while importing the checkpoint.
        portable: True for a TorchScript file without our operators.
        precision: How the weights are kept: a float dtype, or "int8"; "" in older files, whose
            weights have the dtype of the outputs.
        format_version: Raised when older readers could not use the file.
    """

    kind: ArtefactKind
    config: dict[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[StateSlice, ...]
    weights_sha256: str
    versions: dict[str, str]
    parity: dict[str, float] = field(default_factory=dict[str, float])
    proof_sha256: str = ""
    notes: tuple[str, ...] = ()
    portable: bool = False
    precision: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def state_size(self) -> int:
        """Columns of the state tensor; 0 when the model has no state."""
        return self.state[-1].stop if self.state else 0

    def to_json(self) -> str:
        """The manifest as JSON text, keys sorted so that equal manifests are equal bytes."""
        return json.dumps(to_mapping(self), sort_keys=True, indent=1)

    @staticmethod
    def from_json(text: str | bytes, where: str = "artefact") -> Manifest:
        """Read a manifest.

        Raises:
            ArtefactError: Not JSON, another format version, or unknown or missing keys.
        """
        try:
            mapping: Any = json.loads(text)
        except ValueError as error:
            raise ArtefactError(f"{where}: its manifest is not JSON: {error}") from error
        fields = cast("dict[str, Any]", mapping) if isinstance(mapping, dict) else {}
        version = fields.get("format_version")
        if version != FORMAT_VERSION:
            raise ArtefactError(
                f"{where}: manifest format {version!r}, this release reads {FORMAT_VERSION}; "
                "export the model again, or use the release that wrote it"
            )
        try:
            return from_mapping(Manifest, fields, f"{where} manifest")
        except ConfigError as error:
            raise ArtefactError(str(error)) from error
