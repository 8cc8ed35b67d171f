"""Repeats the proof of an artefact later: on another machine, with other versions, on real data."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeAlias

from qrnn_export.artefact import read_artefact
from qrnn_export.chain_file import SUFFIX, read_chain
from qrnn_export.data_file import read_batches
from qrnn_export.devices import find_devices
from qrnn_export.errors import ParityError
from qrnn_export.importer import import_file
from qrnn_export.options import ImportHints
from qrnn_export.proof import Proof, answering, prove, questions
from qrnn_serve.core.errors import ArtefactError
from qrnn_serve.core.manifest import Manifest
from qrnn_serve.core.proof_file import check_measured, read_proof
from qrnn_serve.model.checkpoint import weights_sha256
from qrnn_serve.model.parts import joined
from qrnn_serve.model.parts import part as cut_out
from qrnn_serve.model.precision import convert, precision_of
from qrnn_serve.model.sequence_model import SequenceModel

_Part: TypeAlias = tuple[Manifest, SequenceModel]


def verify(
    artefact: Path,
    against: Path | None = None,
    data: Path | None = None,
    *,
    column: str = "features",
    hints: ImportHints | None = None,
    trust_pickle: bool = False,
    devices: Sequence[str] = (),
) -> Proof:
    """Check an artefact's files against its proof, and compare it with the module once more.

    Args:
        artefact: A .ts.pt, .onnx or .pt2 file of qrnn-export, or the .stages.json of a model in
            stages, with the proofs beside the files.
        against: The checkpoint it was made from; None is the weights that the artefact holds.
        data: A Parquet file with rows to compare on, beside the random ones.
        column: The column of `data` with the rows.
        hints: Facts that a foreign `against` does not hold.
        trust_pickle: Unpickle `against` even if that runs code.
        devices: Where to compare: "cpu", "cuda" or "cuda:N"; () is the CPU, and the first GPU where
            there is one.

    Returns:
        What was measured now, in a fresh process.

    Raises:
        ArtefactError: A file is missing, damaged or not the one that was proven.
        CheckpointError: `against` cannot be used.
        ConfigError: A device is not here.
        InputError: `data` cannot be used.
        ParityError: The numbers differ, or `against` holds another model.
    """
    hints, places = hints or ImportHints(), find_devices(devices)
    parts = _read_parts(artefact)
    model = parts[0][1] if len(parts) == 1 else joined([part for _, part in parts])
    if against is not None:
        imported = import_file(against, hints, trust_pickle=trust_pickle).model
        model = convert(imported, precision_of(model))
        if not _holds(model, parts):
            raise ParityError(f"{against} does not hold the weights that {artefact} was made from")
    cases = list(questions(model))
    if data is not None:
        cases += read_batches(data, column, model)
    with tempfile.TemporaryDirectory() as directory:
        answered = map(answering(model), cases)
        return prove(model, [artefact], Path(directory), answered, places)


def _read_parts(artefact: Path) -> list[_Part]:
    """An artefact, or the stages of a chain; all files checked against their proofs."""
    proven = read_proof(artefact)
    if not artefact.name.endswith(SUFFIX):
        manifest, model = read_artefact(artefact)
        check_measured(proven, manifest.proof_sha256, artefact)
        return [(manifest, model)]
    chain = read_chain(artefact)
    check_measured(proven, chain.proof_sha256, artefact)
    named = {entry.file: entry.sha256 for files in chain.artefacts.values() for entry in files}
    if any(proven.beside_sha256.get(name) != digest for name, digest in named.items()):
        raise ArtefactError(f"{artefact}: damaged: it names files that its proof is not about")
    by_format = [
        [part for entry in files for part in _read_parts(artefact.with_name(entry.file))]
        for files in chain.artefacts.values()
    ]
    if not by_format:
        raise ArtefactError(f"{artefact}: damaged: it names no artefacts")
    hashes = [[manifest.weights_sha256 for manifest, _ in parts] for parts in by_format]
    if any(other != hashes[0] for other in hashes[1:]):
        raise ArtefactError(f"{artefact}: its formats {list(chain.artefacts)} hold other weights")
    return by_format[0]


def _holds(model: SequenceModel, parts: list[_Part]) -> bool:
    """Whether the parts, in their order, are the layers of the model, weight by weight."""
    if len(parts) == 1:
        found = [model]
    else:
        counts = [len(part.config.qrnn.layers) for _, part in parts]
        edges = list(accumulate(counts, initial=0))
        if edges[-1] != len(model.config.qrnn.layers):
            return False
        found = [cut_out(model, first, stop) for first, stop in pairwise(edges)]
    return all(
        weights_sha256(own.state_dict()) == manifest.weights_sha256
        for own, (manifest, _) in zip(found, parts, strict=True)
    )
