"""All layouts, and which one a file has."""

from __future__ import annotations

import re

from qrnn_export.layouts.awd_lstm_lm import AWD_LSTM_LM
from qrnn_export.layouts.base import Layout, Tensors, some
from qrnn_export.layouts.fastai import FASTAI_V1, FASTAI_V2
from qrnn_export.layouts.paper import PAPER
from qrnn_export.layouts.pase import PASE
from qrnn_export.layouts.pqrnn import PQRNN
from qrnn_export.layouts.pytorch_ehr import PYTORCH_EHR
from qrnn_export.layouts.salesforce import SALESFORCE
from qrnn_export.layouts.unsupported import QRNN3D, SPLIT_CONVOLUTIONS
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError, ConfigError

_READ = (SALESFORCE, PAPER, AWD_LSTM_LM, FASTAI_V1, FASTAI_V2, PASE, PYTORCH_EHR, PQRNN)
_REFUSED = (QRNN3D, SPLIT_CONVOLUTIONS)

LAYOUTS = {layout.name: layout for layout in (*_READ, *_REFUSED)}

_GATES_OF_CELLS = {4: "LSTM", 3: "GRU", 1: "plain RNN"}


def find_layout(tensors: Tensors, name: str | None) -> Layout:
    """The layout of these tensors, found by their names and shapes.

    Args:
        tensors: A state dict.
        name: The layout that the caller says it is, or None.

    Raises:
        CheckpointError: They are of another cell, or of no known layout.
        AmbiguousCheckpointError: They could be of several layouts.
        ConfigError: There is no layout of that name.
    """
    if name is not None and name not in LAYOUTS:
        raise ConfigError(f"--layout: expected one of {sorted(LAYOUTS)}, got {name!r}")
    refuse_other_cells(tensors)
    if name is not None:
        return LAYOUTS[name]
    found = [layout for layout in LAYOUTS.values() if layout.matches(tensors)]
    if len(found) == 1:
        return found[0]
    if found:
        listed = "; ".join(f"{layout.name}: {layout.describes}" for layout in found)
        raise AmbiguousCheckpointError(
            f"the names of the tensors are of several layouts\n  give --layout, one of {listed}"
        )
    known = "; ".join(f"{layout.name}: {layout.describes}" for layout in _READ)
    raise CheckpointError(
        f"the names of the tensors are of no layout that is known: {some(list(tensors))}. Known "
        f"layouts are {known}"
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
