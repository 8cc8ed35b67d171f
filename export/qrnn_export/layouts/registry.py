"""All layouts, and which one a file has."""

from __future__ import annotations

import re

from qrnn_export.layouts.base import Layout, Tensors
from qrnn_export.layouts.salesforce import SALESFORCE
from qrnn_serve.core.errors import CheckpointError, ConfigError

LAYOUTS = {layout.name: layout for layout in (SALESFORCE,)}

_GATES_OF_CELLS = {4: "LSTM", 3: "GRU", 1: "plain RNN"}


def find_layout(tensors: Tensors, name: str | None) -> Layout:
    """The layout of these tensors, found by their names.

    Args:
        tensors: A state dict.
        name: The layout that the caller says it is, or None.

    Raises:
        CheckpointError: They are of another cell, of no known layout, or not of the named one.
        ConfigError: There is no layout of that name.
    """
    if name is not None and name not in LAYOUTS:
        raise ConfigError(f"--layout: expected one of {sorted(LAYOUTS)}, got {name!r}")
    refuse_other_cells(tensors)
    candidates = [LAYOUTS[name]] if name is not None else LAYOUTS.values()
    for layout in candidates:
        if layout.matches(tensors):
            return layout
    known = "; ".join(f"{layout.name}: {layout.describes}" for layout in LAYOUTS.values())
    asked = f"not of the layout {name!r}" if name else "of no layout that is known"
    raise CheckpointError(
        f"the names of the tensors are {asked}: {_some(list(tensors))}. Known layouts are {known}"
    )


def refuse_other_cells(tensors: Tensors) -> None:
    """Refuse weights that are not of a QRNN, whatever the file calls itself.

    Raises:
        CheckpointError: The weights are of an LSTM, GRU, plain RNN or SRU; they are named.
    """
    for key, tensor in tensors.items():
        if re.search(r"(^|\.)weight_hh(_l\d+|$)", key) and tensor.dim() == 2:
            rows, columns = tensor.shape
            cell = _GATES_OF_CELLS.get(rows // columns if columns else 0, "recurrent")
            raise CheckpointError(
                f"{cell} weights found, not QRNN: {key} is {list(tensor.shape)}. A QRNN has no "
                "weights between hidden states; was the QRNN library missing when the model was "
                "trained?"
            )
    names = list(tensors)
    if ih := [k for k in names if re.search(r"(^|\.)weight_ih(_l\d+|$)", k)]:
        raise CheckpointError(f"LSTM or GRU weights found, not QRNN: {ih[0]}")
    if sru := [k for k in names if re.search(r"(^|\.)rnn_lst\.\d+\.", k)]:
        raise CheckpointError(
            f"SRU weights found, not QRNN: {sru[0]}. The state of an SRU enters its gates, so it "
            "cannot be turned into a QRNN"
        )


def _some(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > limit else shown
