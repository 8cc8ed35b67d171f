"""What another precision costs: how far the converted module's scores are from the module's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qrnn_export.cases import Case
from qrnn_export.proof import answer
from qrnn_serve.model.parts import weight_bytes
from qrnn_serve.model.precision import Precision, precision_of
from qrnn_serve.model.sequence_model import SequenceModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a conversion costs and saves.

    Attributes:
        before: Precision of the module that was imported.
        after: Precision of the artefacts.
        bytes_before: Size of its weights.
        bytes_after: Size of theirs.
        measured_on: The rows: a file, or random ones.
        vectors: Output vectors that were compared.
        largest_difference: Largest absolute difference of an output.
        relative_norm: |after - before| / |before| over all outputs.
        changed_argmax: Share of the vectors whose largest entry is another; None for outputs that
            are not logits of several classes.
    """

    before: Precision
    after: Precision
    bytes_before: int
    bytes_after: int
    measured_on: str
    vectors: int
    largest_difference: float
    relative_norm: float
    changed_argmax: float | None


def measure_cost(
    before: SequenceModel, after: SequenceModel, cases: Iterable[Case], measured_on: str
) -> Cost:
    """Run both modules on the cases and compare their outputs at real timesteps.

    Args:
        before: What was imported.
        after: The same, converted.
        cases: Without answers, for `before`.
        measured_on: What they are, for people.
    """
    largest, off, size, vectors, changed = 0.0, 0.0, 0.0, 0, 0
    for case in cases:
        wanted, got = (_output(model, case) for model in (before, after))
        vectors += len(wanted)
        changed += int((got.argmax(axis=1) != wanted.argmax(axis=1)).sum())
        # In place: outputs over a vocabulary are large.
        got -= wanted
        largest = max(largest, float(np.max(got, initial=0.0)), -float(np.min(got, initial=0.0)))
        off += float(np.vdot(got, got))
        size += float(np.vdot(wanted, wanted))
    head = before.config.head_size or 1
    return Cost(
        before=precision_of(before),
        after=precision_of(after),
        bytes_before=weight_bytes(before),
        bytes_after=weight_bytes(after),
        measured_on=measured_on,
        vectors=vectors,
        largest_difference=largest,
        relative_norm=float(np.sqrt(off / size)) if size else 0.0,
        changed_argmax=changed / max(vectors, 1) if head > 1 else None,
    )


def _output(model: SequenceModel, case: Case) -> npt.NDArray[np.float64]:
    """Output vectors at real timesteps, [V, C] float64."""
    edge = np.dtype(str(model.edge_dtype()).removeprefix("torch."))
    values, state = case.input, case.state
    if values.dtype != np.int64:
        values = values.astype(edge)
    if state is not None:
        state = state.astype(edge)
    given = Case(case.name, values, case.lengths, state, case.output, case.state_out)
    output, _ = answer(model, given)
    if output.ndim == 3 and case.lengths is not None:
        output = output[np.arange(output.shape[1]) < case.lengths[:, None]]
    return output.reshape(-1, output.shape[-1]).astype(np.float64)
