"""One writer for each format: makes the file, and later adds to it what was proven about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeAlias

from qrnn_export import onnx_file, program_file, torchscript_file
from qrnn_export.archive_file import set_manifest
from qrnn_export.artefact_manifest import make_manifest
from qrnn_export.importer import ImportedModel
from qrnn_export.onnx_file import check_onnx, weights_beside, write_onnx
from qrnn_export.onnx_model import build_model
from qrnn_export.options import ExportOptions, Format
from qrnn_export.program_file import export_program, write_compiled, write_program
from qrnn_export.proof import Proof
from qrnn_export.torchscript_file import script, write_torchscript
from qrnn_serve.core.manifest import Manifest
from qrnn_serve.core.proof_file import measured_sha256


class _ArchiveWriter:
    """What writers of a zip archive with the manifest inside have in common."""

    path: Path
    manifest: Manifest

    def add_proof(self, proof: Proof) -> None:
        """Exchange the manifest in the file for one with what was measured."""
        self.manifest = proven_manifest(self.manifest, proof, self.path.name)
        set_manifest(self.path, self.manifest)


class TorchScriptWriter(_ArchiveWriter):
    """Writes a `.ts.pt` file.

    Args:
        imported: What to export.
        path: File to write.
        options: How.
    """

    suffix: ClassVar[str] = ".ts.pt"

    def __init__(self, imported: ImportedModel, path: Path, options: ExportOptions) -> None:
        self.path = path
        self.beside: list[Path] = []
        portable = options.portable
        self.notice = torchscript_file.PORTABLE_NOTICE if portable else torchscript_file.NOTICE
        manifest = make_manifest("torchscript", imported.model, imported.notes)
        self.manifest = replace(manifest, portable=portable)
        write_torchscript(script(imported.model, portable=portable), path, self.manifest)


class OnnxWriter:
    """Writes a `.onnx` file, and its weights beside it when they are large.

    Args:
        imported: What to export.
        path: File to write.
        options: How.
    """

    suffix: ClassVar[str] = ".onnx"

    def __init__(self, imported: ImportedModel, path: Path, options: ExportOptions) -> None:
        self.path = path
        self.notice = onnx_file.NOTICE
        self.beside: list[Path] = []
        self.manifest = make_manifest("onnx", imported.model, imported.notes)
        model = imported.model
        weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
        parts = (model.config, weights, self.manifest.state)
        if sum(w.nbytes for w in weights.values()) > options.external_data_bytes:
            self.beside = [weights_beside(path, self.manifest.weights_sha256)]
            with self.beside[0].open("wb") as file:
                self._graph = build_model(*parts, file)
        else:
            self._graph = build_model(*parts)
        write_onnx(self._graph, path, self.manifest)
        check_onnx(path)

    def add_proof(self, proof: Proof) -> None:
        """Write the file again with what was measured; the graph is the same object."""
        self.manifest = proven_manifest(self.manifest, proof, self.path.name)
        write_onnx(self._graph, self.path, self.manifest)


class ProgramWriter(_ArchiveWriter):
    """Writes a `.pt2` file.

    Args:
        imported: What to export.
        path: File to write.
        options: How.
    """

    suffix: ClassVar[str] = ".pt2"

    def __init__(self, imported: ImportedModel, path: Path, options: ExportOptions) -> None:
        self.path = path
        self.beside: list[Path] = []
        self.notice = program_file.NOTICE
        self.manifest = make_manifest("pt2", imported.model, imported.notes)
        write_program(export_program(imported.model), path, self.manifest)


class CompiledWriter(ProgramWriter):
    """Writes an `.aot.pt2` file: the program as machine code, its weights inside."""

    suffix: ClassVar[str] = ".aot.pt2"

    def __init__(self, imported: ImportedModel, path: Path, options: ExportOptions) -> None:
        self.path = path
        self.beside = []
        self.notice = program_file.AOT_NOTICE
        self.manifest = make_manifest("aot", imported.model, imported.notes)
        write_compiled(export_program(imported.model), path, self.manifest)


def proven_manifest(manifest: Manifest, proof: Proof, artefact: str) -> Manifest:
    """The manifest with the differences that were measured, and the hash of all that was."""
    digest = measured_sha256(proof.measured(artefact))
    return replace(manifest, parity=proof.parity(artefact), proof_sha256=digest)


Writer: TypeAlias = TorchScriptWriter | OnnxWriter | ProgramWriter
WRITERS: dict[Format, type[TorchScriptWriter] | type[OnnxWriter] | type[ProgramWriter]] = {
    "torchscript": TorchScriptWriter,
    "onnx": OnnxWriter,
    "pt2": ProgramWriter,
    "aot": CompiledWriter,
}
