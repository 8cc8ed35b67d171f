"""One export: import the model, write the artefacts, prove them, and only then show them."""

from __future__ import annotations

import glob
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import nn

from qrnn_export.chain_file import SUFFIX, write_chain
from qrnn_export.cost import Cost, measure_cost
from qrnn_export.data_file import read_batches
from qrnn_export.devices import Devices, find_devices
from qrnn_export.html_report import report_page
from qrnn_export.importer import ImportedModel, import_file, import_saved
from qrnn_export.onnx_file import external_files
from qrnn_export.options import ExportOptions, Format
from qrnn_export.program_file import refuse_without_compiler
from qrnn_export.proof import Proof, prove, questions
from qrnn_export.stages import Stage, chain_of, cut
from qrnn_export.staging import publish, publish_folder, refuse_existing, staging_directory
from qrnn_export.torchscript_file import refuse_unsupported, torch_release
from qrnn_export.triton import write_repository
from qrnn_export.writers import WRITERS, Writer
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.manifest import Manifest
from qrnn_serve.core.proof_file import ProofFile, measured_sha256, proof_path, write_proof
from qrnn_serve.model.precision import convert, precision_of
from qrnn_serve.model.sequence_model import SequenceModel

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WrittenArtefact:
    """One artefact that was proven and published.

    Attributes:
        format: "torchscript", "onnx", "pt2" or "aot".
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
        artefacts: In the order of the options' formats; of a model in stages, stage by stage.
        proof: Every measurement of the comparison with the module.
        notes: What was inferred, dropped or converted while importing.
        notices: What the user should know about the artefacts.
        cost: What a conversion to another precision costs; None when there was none.
        chain: The file that says how stages belong together; None when the model is not cut.
    """

    artefacts: tuple[WrittenArtefact, ...]
    proof: Proof
    notes: tuple[str, ...]
    notices: tuple[str, ...]
    cost: Cost | None = None
    chain: Path | None = None


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
        ConfigError: An option cannot be met: a file exists, TorchScript, --aot or a device is not
            supported here, or the model cannot be converted or cut like that.
        InputError: The file to calibrate on cannot be used.
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
    if "aot" in options.formats:
        refuse_without_compiler()
    extras = [directory / _page_name(path.stem)] if options.html else []
    extras += [options.triton] if options.triton is not None else []
    if options.stages is None:
        _refuse_existing([_Piece.of(directory / path.stem, options)], options, extras)
    devices = find_devices(options.devices)
    say(f"Reading {path.name}" if is_file else "Reading the module")
    if is_file:
        imported = import_file(path, options.hints, trust_pickle=options.trust_pickle)
    else:
        imported = import_saved(source, options.hints)
    model = _converted(imported.model, options)
    ready = ImportedModel(model, imported.notes)
    export_ = _Export(directory, path.stem, ready, options, devices, say)
    if options.precision is not None:
        say("Measuring what the conversion costs")
        export_.cost = _measured_cost(imported.model, model, options)
    # What was converted takes as much memory as the checkpoint, and nothing needs it any more.
    del imported
    stages = None if options.stages is None else cut(model, options.stages)
    with staging_directory(directory) as staged:
        return export_.into(staged, stages)


def _converted(model: SequenceModel, options: ExportOptions) -> SequenceModel:
    model = convert(model, options.precision or precision_of(model))
    if precision_of(model) == "bfloat16" and "onnx" in options.formats:
        raise ConfigError(
            "ONNX with bfloat16: ONNX Runtime has no such operators for the CPU, where the file is "
            "proven. Add --dtype float16 or --dtype float32, or leave onnx out, for example "
            "--format torchscript"
        )
    return model


def _measured_cost(before: SequenceModel, after: SequenceModel, options: ExportOptions) -> Cost:
    if options.calibrate is None:
        return measure_cost(before, after, questions(before), "random rows")
    path = Path(options.calibrate)
    rows = read_batches(path, options.column, before)
    return measure_cost(before, after, rows, path.name)


@dataclass(slots=True)
class _Piece:
    """A model that becomes one artefact of each format: all of what was imported, or a stage."""

    targets: dict[Format, Path]
    writers: list[Writer] = field(default_factory=list["Writer"])
    proven: list[ProofFile] = field(default_factory=list[ProofFile])

    @classmethod
    def of(cls, name: Path, options: ExportOptions) -> _Piece:
        """Nothing written yet; `name` is that of the files without what tells the formats apart."""
        return cls({f: name.with_name(name.name + WRITERS[f].suffix) for f in options.formats})

    def files(self) -> list[list[Path]]:
        """For each format what was written, the artefact last."""
        return [[*w.beside, proof_path(w.path), w.path] for w in self.writers]


def _refuse_existing(
    pieces: Sequence[_Piece], options: ExportOptions, others: Sequence[Path] = ()
) -> None:
    targets = [*(t for piece in pieces for t in piece.targets.values()), *others]
    refuse_existing(
        [*targets, *(proof_path(target) for target in targets)], overwrite=options.overwrite
    )


@dataclass(slots=True)
class _Export:
    """What all steps of one export need."""

    directory: Path
    stem: str
    imported: ImportedModel
    options: ExportOptions
    devices: Devices
    say: Progress
    cost: Cost | None = None

    def into(self, staged: Path, stages: list[Stage] | None) -> ExportReport:
        """Write and prove everything in the folder `staged`, then publish it."""
        if stages is None:
            piece = _Piece.of(self.directory / self.stem, self.options)
            proof = self._prove(piece, self.imported.model, staged)
            self._stage_extras(piece, proof, staged)
            report = self._publish([piece], proof)
            return replace(report, notices=(*report.notices, *self._publish_extras(staged)))
        count = len(stages)
        names = [f"{self.stem}.stage{n}of{count}" for n in range(1, count + 1)]
        pieces = [_Piece.of(self.directory / name, self.options) for name in names]
        chain = staged / (self.stem + SUFFIX)
        _refuse_existing(pieces, self.options, [self.directory / chain.name])
        proofs = [
            self._prove(piece, stage.model, staged)
            for piece, stage in zip(pieces, stages, strict=True)
        ]
        proofs.append(self._prove_chain(chain, pieces, stages))
        measurements = tuple(m for proof in proofs for m in proof.measurements)
        absent = {name: lines for proof in proofs for name, lines in proof.absent.items()}
        whole = replace(proofs[-1], measurements=measurements, absent=absent)
        return self._publish(pieces, whole, chain)

    def _prove(self, piece: _Piece, model: SequenceModel, staged: Path) -> Proof:
        for name, target in piece.targets.items():
            self.say(f"Writing {target.name}")
            part = ImportedModel(model, self.imported.notes)
            piece.writers.append(WRITERS[name](part, staged / target.name, self.options))
        self.say("Comparing with the module in a fresh process")
        paths = [writer.path for writer in piece.writers]
        with tempfile.TemporaryDirectory(dir=staged) as work:
            proof = self._compared(model, paths, Path(work))
        self.say("Adding the proofs")
        for writer in piece.writers:
            writer.add_proof(proof)
            measured = proof.measured(writer.path.name)
            piece.proven.append(write_proof(writer.path, writer.beside, measured))
        return proof

    def _prove_chain(self, chain: Path, pieces: Sequence[_Piece], stages: Sequence[Stage]) -> Proof:
        self.say("Comparing the stages, run one after another, with the whole module")
        by_format = zip(*(piece.writers for piece in pieces), strict=True)
        files = {
            name: [writer.path for writer in writers]
            for name, writers in zip(pieces[0].targets, by_format, strict=True)
        }
        told = chain_of(stages, files)
        write_chain(chain, told)
        with tempfile.TemporaryDirectory(dir=chain.parent) as work:
            proof = self._compared(self.imported.model, [chain], Path(work))
        measured = proof.measured(chain.name)
        write_chain(chain, replace(told, proof_sha256=measured_sha256(measured)))
        beside = [file for piece in pieces for files in piece.files() for file in files]
        write_proof(chain, beside, measured)
        return proof

    def _stage_extras(self, piece: _Piece, proof: Proof, staged: Path) -> None:
        if self.options.triton is not None:
            self.say("Writing the Triton model repository")
            sources = dict(zip(piece.targets, piece.writers, strict=True))
            write_repository(staged / "triton", self.stem, self.imported, sources)
        if self.options.html:
            files = [file for w in piece.writers for file in (w.path, *w.beside)]
            sizes = {file.name: file.stat().st_size for file in files}
            page = report_page(self.stem, proof, sizes, self.imported.notes)
            (staged / _page_name(self.stem)).write_text(page, encoding="utf-8")

    def _publish_extras(self, staged: Path) -> Iterator[str]:
        """Publish them, and give a notice of each."""
        if self.options.triton is not None:
            publish_folder(staged / "triton", self.options.triton)
            readme = self.options.triton / "README.md"
            yield f"{readme} says how to run Triton with the models."
        if self.options.html:
            publish([staged / _page_name(self.stem)], self.directory)
            yield f"{self.directory / _page_name(self.stem)} shows what was measured."

    def _compared(self, model: SequenceModel, paths: Sequence[Path], work: Path) -> Proof:
        facts = {} if self.cost is None else {"cost": asdict(self.cost)}
        return replace(prove(model, paths, work, devices=self.devices), facts=facts)

    def _publish(
        self, pieces: Sequence[_Piece], proof: Proof, chain: Path | None = None
    ) -> ExportReport:
        before = {old for piece in pieces for old in weights_beside(piece.targets)}
        artefacts: list[WrittenArtefact] = []
        for piece in pieces:
            for name, writer, proven, files in zip(
                piece.targets, piece.writers, piece.proven, piece.files(), strict=True
            ):
                *beside, file = publish(files, self.directory)
                digest = proven.artefact_sha256
                written = WrittenArtefact(name, file, tuple(beside), digest, writer.manifest)
                artefacts.append(written)
        for stale in before - {b for a in artefacts for b in a.beside}:
            stale.unlink(missing_ok=True)
        if chain is not None:
            _, chain = publish([proof_path(chain), chain], self.directory)
        return ExportReport(
            tuple(artefacts),
            proof,
            self.imported.notes,
            tuple(writer.notice for writer in pieces[0].writers),
            self.cost,
            chain,
        )


def _page_name(stem: str) -> str:
    return f"{stem}.report.html"


def weights_beside(targets: dict[Format, Path]) -> set[Path]:
    """Our weights beside an ONNX file that is about to be replaced."""
    target = targets.get("onnx")
    if target is None or not target.exists():
        return set()
    ours = set(target.parent.glob(f"{glob.escape(target.stem)}.*.onnx.data"))
    return ours & set(external_files(target))
