"""One export: import the model, write the artefacts, prove them, and only then show them."""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from qrnn_export.html_report import report_page
from qrnn_export.importer import ImportedModel, import_file, import_saved
from qrnn_export.onnx_file import external_files
from qrnn_export.options import ExportOptions, Format
from qrnn_export.proof import Proof, prove
from qrnn_export.staging import publish, publish_folder, refuse_existing, staging_directory
from qrnn_export.torchscript_file import refuse_unsupported, torch_release
from qrnn_export.triton import write_repository
from qrnn_export.writers import WRITERS
from qrnn_serve.core.manifest import Manifest
from qrnn_serve.core.proof_file import proof_path, write_proof

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WrittenArtefact:
    """One artefact that was proven and published.

    Attributes:
        format: "torchscript" or "onnx".
        path: The file to load.
        beside: Further files that must stay with it: its proof, and ONNX external data.
        sha256: Of the file at `path`.
        manifest: What the file says about itself.
    """

    format: Format
    path: Path
    beside: tuple[Path, ...]
    sha256: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did.

    Attributes:
        artefacts: In the order of the options' formats.
        proof: Every measurement of the comparison with the module.
        notes: What was inferred, dropped or converted while importing.
        notices: What the user should know about the artefacts.
    """

    artefacts: tuple[WrittenArtefact, ...]
    proof: Proof
    notes: tuple[str, ...]
    notices: tuple[str, ...]


def export(
    source: str | Path | nn.Module,
    output_dir: str | Path | None = None,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Export a model, and prove in a fresh process that the artefacts give its numbers.

    Args:
        source: A checkpoint file, or a module: a SequenceModel, a QRNN, one around a QRNN that
            computes what a SequenceModel can, or one whose state dict has a known layout. A module
            is not changed.
        output_dir: Where to write; made when missing. None is beside the file, or the current
            folder for a module.
        options: How to export.
        progress: Called with a sentence as each step begins.

    Returns:
        What was written. Nothing is written unless every artefact was proven.

    Raises:
        CheckpointError: The source cannot be used; the message says why and what to do.
        ConfigError: An option cannot be met: a file exists, or TorchScript is not supported here.
        ParityError: An artefact did not give the module's numbers. Nothing was written.
        OSError: The folder cannot be written to, or is full. Nothing was written.
    """
    options = options or ExportOptions()
    say = progress or (lambda _: None)
    is_file = isinstance(source, (str, Path))
    path = Path(source) if is_file else Path("model.pt")
    directory = Path(output_dir) if output_dir is not None else path.parent
    if "torchscript" in options.formats:
        refuse_unsupported(sys.version_info[:2], torch_release())
    targets: dict[Format, Path] = {
        f: directory / (path.stem + WRITERS[f].suffix) for f in options.formats
    }
    proofs = [proof_path(target) for target in targets.values()]
    extras = [directory / _page_name(path.stem)] if options.html else []
    extras += [options.triton] if options.triton is not None else []
    refuse_existing([*targets.values(), *proofs, *extras], overwrite=options.overwrite)
    say(f"Reading {path.name}" if is_file else "Reading the module")
    if is_file:
        imported = import_file(path, options.hints, trust_pickle=options.trust_pickle)
    else:
        imported = import_saved(source, options.hints)
    with staging_directory(directory) as staged:
        return _export_into(staged, path.stem, targets, imported, options, say)


def _export_into(
    staged: Path,
    stem: str,
    targets: dict[Format, Path],
    imported: ImportedModel,
    options: ExportOptions,
    say: Progress,
) -> ExportReport:
    written = []
    for name, target in targets.items():
        say(f"Writing {target.name}")
        written.append(WRITERS[name](imported, staged / target.name, options))
    say("Comparing with the module in a fresh process")
    proof = prove(imported.model, [w.path for w in written], staged)
    say("Adding the proofs")
    for writer in written:
        writer.add_proof(proof)
    if options.triton is not None:
        say("Writing the Triton model repository")
        sources = dict(zip(targets, written, strict=True))
        write_repository(staged / "triton", stem, imported, sources)
    if options.html:
        files = [file for writer in written for file in (writer.path, *writer.beside)]
        sizes = {file.name: file.stat().st_size for file in files}
        page = report_page(stem, proof, sizes, imported.notes)
        (staged / _page_name(stem)).write_text(page, encoding="utf-8")
    directory = next(iter(targets.values())).parent
    before = weights_beside(targets)
    artefacts = []
    for name, writer in zip(targets, written, strict=True):
        proven = write_proof(writer.path, writer.beside, proof.measured(writer.path.name))
        files = [*writer.beside, proof_path(writer.path), writer.path]
        *beside, file = publish(files, directory)
        digest = proven.artefact_sha256
        artefacts.append(WrittenArtefact(name, file, tuple(beside), digest, writer.manifest))
    if options.triton is not None:
        publish_folder(staged / "triton", options.triton)
    if options.html:
        publish([staged / _page_name(stem)], directory)
    for stale in before - {b for a in artefacts for b in a.beside}:
        stale.unlink(missing_ok=True)
    notices = [writer.notice for writer in written]
    if options.triton is not None:
        notices.append(f"{options.triton / 'README.md'} says how to run Triton with the models.")
    if options.html:
        notices.append(f"{directory / _page_name(stem)} shows what was measured.")
    return ExportReport(tuple(artefacts), proof, imported.notes, tuple(notices))


def _page_name(stem: str) -> str:
    return f"{stem}.report.html"


def weights_beside(targets: dict[Format, Path]) -> set[Path]:
    """Our weights beside an ONNX file that is about to be replaced."""
    target = targets.get("onnx")
    if target is None or not target.exists():
        return set()
    ours = set(target.parent.glob(f"{glob.escape(target.stem)}.*.onnx.data"))
    return ours & set(external_files(target))
