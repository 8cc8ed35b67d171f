"""What `predict` gives back: outputs and errors by row, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """Why one row was not scored. Found by this client before sending, or by the server.

    Attributes:
        row: Index of the row in the caller's rows.
        code: Name of a gRPC status, for example "INVALID_ARGUMENT".
        message: For people: what is wrong and what to do.
        field: The part that is wrong: "values" or "state".
        expected: What the model takes there.
        got: What came.
        timestep: First wrong timestep of the row, or None when the whole row is wrong.
    """

    row: int
    code: str
    message: str
    field: str
    expected: str
    got: str
    timestep: int | None = None

    def __str__(self) -> str:
        where = "" if self.timestep is None else f", timestep {self.timestep}"
        return f"row {self.row}{where}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time of a prediction went.

    Attributes:
        total_s: Wall time of `predict`.
        decode_s: Reading and checking the calls on the server. This and what follows are summed
            over the calls.
        queue_s: Waiting in the server's queue.
        upload_s: Bringing the batches that held the rows to the device.
        compute_s: Running the model on them.
        download_s: Bringing the answers back.
        encode_s: Writing the replies.
        calls: Calls that the rows were cut into.
        attempts: How often calls were sent; more than `calls` when some were retried.
    """

    total_s: float
    decode_s: float
    queue_s: float
    upload_s: float
    compute_s: float
    download_s: float
    encode_s: float
    calls: int
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """The scores of some rows, all from one version of one model.

    Attributes:
        outputs: One entry a row, in the caller's order: [C], or [T, C] for a model with one vector
            a timestep, of the model's dtype and read-only; None for a row that has an error.
        errors: The rows that were not scored, ascending.
        states: When asked for, one entry a row: [S] after its last timestep, to give to the next
            `predict` as `states`; None for a row that has an error.
        model: Name of the model that scored the rows.
        version: Its version.
        output_name: What the scores are: "logits" or "output".
        devices: Where the calls ran, for example ("cuda:0",).
        engine: "native", "torchscript" or "onnx"; empty when no row was sent.
        request_id: As it stands in the server's log; calls add "/0", "/1", ...
        timing: Where the time went.
    """

    outputs: list[npt.NDArray[Any] | None]
    errors: list[RowError]
    states: list[npt.NDArray[Any] | None] | None
    model: str
    version: str
    output_name: str
    devices: tuple[str, ...]
    engine: str
    request_id: str
    timing: Timing

    @property
    def ok(self) -> bool:
        """True when every row was scored."""
        return not self.errors
