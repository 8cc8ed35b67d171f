"""Repeats the proof of an artefact later: on another machine, with other versions, on real data."""

from __future__ import annotations

import tempfile
from pathlib import Path

from qrnn_export.artefact import read_artefact
from qrnn_export.data_file import read_batches
from qrnn_export.errors import ParityError
from qrnn_export.importer import import_file
from qrnn_export.options import ImportHints
from qrnn_export.proof import Proof, answering, prove, questions
from qrnn_serve.core.proof_file import check_measured, read_proof
from qrnn_serve.model.checkpoint import weights_sha256
from qrnn_serve.model.precision import convert, precision_of


def verify(
    artefact: Path,
    against: Path | None = None,
    data: Path | None = None,
    *,
    column: str = "features",
    hints: ImportHints | None = None,
    trust_pickle: bool = False,
) -> Proof:
    """Check an artefact's files against its proof, and compare it with the module once more.

    Args:
        artefact: A .ts.pt, .onnx or .pt2 file of qrnn-export, with its proof beside it.
        against: The checkpoint it was made from; None is the weights that the artefact holds.
        data: A Parquet file with rows to compare on, beside the random ones.
        column: The column of `data` with the rows.
        hints: Facts that a foreign `against` does not hold.
        trust_pickle: Unpickle `against` even if that runs code.

    Returns:
        What was measured now, in a fresh process.

    Raises:
        ArtefactError: A file is missing, damaged or not the one that was proven.
        CheckpointError: `against` cannot be used.
        InputError: `data` cannot be used.
        ParityError: The numbers differ, or `against` holds another model.
    """
    proven = read_proof(artefact)
    manifest, model = read_artefact(artefact)
    check_measured(proven, manifest, artefact)
    if against is not None:
        imported = import_file(against, hints or ImportHints(), trust_pickle=trust_pickle).model
        model = convert(imported, precision_of(model))
        if weights_sha256(model.state_dict()) != manifest.weights_sha256:
            raise ParityError(f"{against} does not hold the weights that {artefact} was made from")
    cases = list(questions(model))
    if data is not None:
        cases += read_batches(data, column, model)
    with tempfile.TemporaryDirectory() as directory:
        return prove(model, [artefact], Path(directory), map(answering(model), cases))
