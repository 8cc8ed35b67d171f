"""Plans for small models, and the batches that placed ones are tried with."""

from __future__ import annotations

from qrnn_serve.model.sequence_model import SequenceModel
from qrnn_serve.scorers.placement import Stage

BATCHES = {
    "one timestep": [1],
    "one row": [17],
    "uneven": [3, 1, 40, 2, 2, 9, 129],
    "single steps": [1] * 33,
    "long row": [5, 1500, 1],
    "long rows": [700, 700, 700],
}
COUNTS = (1, 2, 3, 7, 16)
"""Numbers of pieces."""


def stages_over(model: SequenceModel, devices) -> tuple[Stage, ...]:
    """The layers over the devices in their order: one each, and the last has the rest."""
    last = len(model.config.qrnn.layers) - 1
    stages = [Stage(device=device, first=n, last=n) for n, device in enumerate(devices[:-1])]
    return (*stages, Stage(device=devices[-1], first=len(stages), last=last))
