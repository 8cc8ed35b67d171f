"""What a caller can say about an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.model.config import ZoneoutRule

Precision = Literal["float32", "float16", "bfloat16", "int8"]
"""What an export can convert weights to."""

Format = Literal["torchscript", "onnx", "pt2", "aot"]
FORMATS: tuple[Format, ...] = ("torchscript", "onnx", "pt2", "aot")
DEFAULT_FORMATS: tuple[Format, ...] = ("torchscript", "onnx")
"""The others start torch's compiler, which takes longer than a small export."""
TRITON_FORMATS: tuple[Format, ...] = ("torchscript", "onnx")
"""Those that a backend of Triton runs."""

PROTOBUF_LIMIT_BYTES = 2**31
"""A protobuf message must stay below it (2 GiB), weights and all."""

EXTERNAL_DATA_BYTES = 64 << 20
"""Weights in a protobuf message are copied several times over, where a file beside it is mapped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportHints:
    """Facts about a foreign checkpoint that its file does not hold. None or () is "not said".

    For `hidden_size` and `window`, one value is for every layer that the file leaves open, several
    are one for each layer.

    Attributes:
        layout: Name of the layout; None finds it by the names of the tensors.
        hidden_size: Hidden widths H.
        window: Window widths.
        output_gate: Whether the layers that the file leaves open have an output gate.
        zoneout: Share p of zoneout that the model was trained with, the same for all layers.
        zoneout_rule: What zoneout does when evaluating; None takes the layout's.
        bidirectional: How two directions are joined, for files that hold both.
        ids_per_timestep: Ids of one timestep, for layouts that sum their embeddings.
    """

    layout: str | None = None
    hidden_size: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    output_gate: bool | None = None
    zoneout: float | None = None
    zoneout_rule: ZoneoutRule | None = None
    bidirectional: Literal["per_layer", "stacks"] | None = None
    ids_per_timestep: int | None = None

    def __post_init__(self) -> None:
        if self.ids_per_timestep is not None and self.ids_per_timestep < 1:
            raise ConfigError(
                f"--ids-per-timestep: expected at least 1, got {self.ids_per_timestep}"
            )
        for flag, values in (("--hidden", self.hidden_size), ("--window", self.window)):
            if any(v < 1 for v in values):
                raise ConfigError(f"{flag}: expected numbers of at least 1, got {list(values)}")
        if self.zoneout is not None and not 0 <= self.zoneout <= 1:
            raise ConfigError(f"--zoneout: expected 0 to 1, got {self.zoneout}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """How to export.

    Attributes:
        formats: Which artefacts to write.
        triton: Folder for a Triton model repository with the same models, in TRITON_FORMATS; None
            for none.
        html: Write a page with plots of what was measured, beside the artefacts.
        portable: Write a TorchScript file without our operators, which any libtorch loads.
        dtype: Convert the weights to float32, float16 or bfloat16; None leaves them as they are.
        int8: Keep the weights of matrix products in int8.
        calibrate: A Parquet file with rows on which to measure what the conversion costs.
        column: The column of `calibrate` with the rows.
        stages: Cut the model into so many artefacts, each of whole layers; "auto" is one for each
            GiB of weights, at least two; None does not cut.
        overwrite: Replace artefacts that exist.
        devices: Where to compare the artefacts with the module: "cpu", "cuda" or "cuda:N"; () is
            the CPU, and the first GPU where there is one.
        trust_pickle: Unpickle files that can run code.
        hints: Facts that a foreign checkpoint does not hold.
        external_data_bytes: ONNX weights above this many bytes go to a file beside the model.
    """

    formats: tuple[Format, ...] = DEFAULT_FORMATS
    triton: Path | None = None
    html: bool = False
    portable: bool = False
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    int8: bool = False
    calibrate: Path | None = None
    column: str = "features"
    stages: int | Literal["auto"] | None = None
    overwrite: bool = False
    devices: tuple[str, ...] = ()
    trust_pickle: bool = False
    hints: ImportHints = field(default_factory=ImportHints)
    external_data_bytes: int = EXTERNAL_DATA_BYTES

    def __post_init__(self) -> None:
        unknown = [f for f in self.formats if f not in FORMATS]
        if unknown or not self.formats:
            raise ConfigError(
                f"--format: expected some of {list(FORMATS)}, got {list(self.formats)}"
            )
        if self.portable and "torchscript" not in self.formats:
            raise ConfigError(
                "--portable: only a TorchScript file can be; add --format torchscript"
            )
        no_backend = [f for f in self.formats if f not in TRITON_FORMATS]
        if self.triton is not None and no_backend:
            raise ConfigError(
                f"--triton: no backend of Triton runs {', '.join(no_backend)}; write the "
                f"repository with --format {','.join(TRITON_FORMATS)} or one of them"
            )
        if self.dtype not in (None, "float32", "float16", "bfloat16"):
            raise ConfigError(f"--dtype: expected float32, float16 or bfloat16, got {self.dtype!r}")
        if self.int8 and self.dtype is not None:
            raise ConfigError(
                f"--int8 with --dtype {self.dtype}: beside int8 weights everything stays float32; "
                "choose one of the two"
            )
        if self.calibrate is not None and self.precision is None:
            raise ConfigError(
                "--calibrate: nothing is converted, so there is no cost to measure; add --int8 or "
                "--dtype, or compare later with `qrnn-export verify --data FILE`"
            )
        if self.stages is not None and self.stages != "auto" and self.stages < 2:
            raise ConfigError(f"--stages: expected auto or at least 2, got {self.stages}")
        if self.stages is not None and (self.triton is not None or self.html):
            raise ConfigError(
                "--stages: a Triton repository and a page of plots are for one model; leave "
                "--triton and --html out"
            )
        if self.stages is not None and "aot" in self.formats:
            raise ConfigError(
                "--stages with --aot: stages are for runtimes that place them on devices, machine "
                "code is for one CPU; leave one of them out"
            )
        if not 0 <= self.external_data_bytes <= PROTOBUF_LIMIT_BYTES:
            raise ConfigError(
                f"external_data_bytes: expected 0 to {PROTOBUF_LIMIT_BYTES} (2 GiB, the limit of a "
                f"protobuf message), got {self.external_data_bytes}"
            )

    @property
    def precision(self) -> Precision | None:
        """What to convert the weights to; None leaves them as they are."""
        return "int8" if self.int8 else cast("Precision | None", self.dtype)
