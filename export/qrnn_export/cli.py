"""The command qrnn-export: export a model, look into a file, or prove an artefact again.

torch is imported when a command runs, so that `qrnn-export --help` answers at once.
"""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qrnn_export.cli_conversion import conversion_options
from qrnn_export.cli_import import hints, import_options
from qrnn_export.errors import ParityError
from qrnn_export.options import DEFAULT_FORMATS, ExportOptions
from qrnn_serve.core.errors import KernelError, QRNNError

if TYPE_CHECKING:
    from rich.console import Console

    from qrnn_export.inspection import Inspection

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AS_THEY_ARE = ("dtype", "int8", "calibrate", "column", "stages", "devices", "trust_pickle")
"""Flags that are options of an export under the same name."""
_EXIT_PROOF_FAILED = 1
_EXIT_BAD_INPUT = 2
_EXIT_TERMINATED = 128 + signal.SIGTERM


class ExportGroup(click.Group):
    """`qrnn-export MODEL` is short for `qrnn-export export MODEL`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command in front of a first word that is no command."""
        own = {*self.commands, "--help", "-h"}
        if args and args[0] not in own:
            args = ["export", *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the help of the default command, and the other commands below it."""
        command = self.commands["export"]
        command.format_help(click.Context(command, info_name=ctx.info_name), formatter)
        self.format_commands(ctx, formatter)


class FormatList(click.ParamType):
    """Formats separated by commas."""

    name = "FORMAT[,FORMAT]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Text to a tuple of format names; the options check them."""
        return value if isinstance(value, tuple) else tuple(dict.fromkeys(value.split(",")))


class DeviceList(FormatList):
    """Devices separated by commas; they are checked where torch is."""

    name = "DEVICE[,DEVICE]"


device_option = click.option(
    "--device",
    "devices",
    type=DeviceList(),
    default=(),
    help="Where to compare with the module: cpu, cuda or cuda:N. Left out, on the CPU alone.",
)


@click.group(cls=ExportGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Export a QRNN model, or look into a file."""


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "formats",
    type=FormatList(),
    default=",".join(DEFAULT_FORMATS),
    show_default=True,
    help="What to write: torchscript, onnx, pt2 (torch.export), aot (as --aot).",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder to write to; beside MODEL when left out.",
)
@click.option(
    "--portable",
    is_flag=True,
    help="Write the TorchScript file in torch's own operators: it loads in any libtorch, without "
    "qrnn_serve, and scores slower.",
)
@click.option(
    "--aot",
    is_flag=True,
    help="Also compile the model with torch's AOTInductor, for this machine's kind of CPU: "
    "MODEL.aot.pt2. Needs a C++ compiler; takes about a minute.",
)
@conversion_options
@click.option(
    "--triton",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write a model repository for Triton too, with a README.md that says how to run it.",
)
@click.option(
    "--html",
    is_flag=True,
    help="Write MODEL.report.html too: plots of error, size and time, in one file.",
)
@device_option
@click.option("--overwrite", is_flag=True, help="Replace artefacts that exist.")
@import_options
def export(
    model: Path,
    formats: tuple[Any, ...],
    output: Path | None,
    portable: bool,
    aot: bool,
    triton: Path | None,
    html: bool,
    overwrite: bool,
    **facts: Any,
) -> None:
    """Export MODEL to TorchScript, ONNX or torch.export, and prove that the numbers did not change.

    MODEL is a checkpoint of qrnn_serve.save (.pt, .safetensors), or one of
    salesforce/pytorch-qrnn, awd-lstm-lm, fastai, PASE+, pytorch_ehr or pQRNN. Writes MODEL.ts.pt
    and MODEL.onnx; MODEL.pt2 with --format pt2. Each file is loaded in a fresh process and compared
    with the module at many sizes before it appears.

    \b
    Examples:
      qrnn-export model.pt                       both formats, beside model.pt
      qrnn-export model.pt --format onnx -o out  ONNX only, into out/
      qrnn-export model.pt --format torchscript --portable
                                                 for programs without qrnn_serve
      qrnn-export model.pt --format pt2 --aot    torch.export, and machine code
      qrnn-export model.pt --int8 --calibrate rows.parquet
                                                 smaller, and what it costs on your rows
      qrnn-export model.pt --stages auto         one artefact for each part of the layers
      qrnn-export model.pt --triton models       and a model repository for Triton
      qrnn-export old.pt --zoneout 0 --window 2 --hidden 640
                                                 a bare state dict: say what it does not hold
      qrnn-export inspect old.pt                 what is in a file, and which flags it needs
      qrnn-export verify model.onnx              prove it once more, on this machine

    Exit status: 0 written and proven, 1 the proof failed and nothing was written, 2 bad input.
    """  # noqa: D301  (click reads the backspace as "do not reflow")
    from rich.console import Console

    from qrnn_export import exporter
    from qrnn_export.report import print_report

    console = Console(stderr=True)
    with friendly_errors(), terminating_cleanly():
        options = ExportOptions(
            formats=tuple(dict.fromkeys([*formats, "aot"])) if aot else formats,
            portable=portable,
            triton=triton,
            html=html,
            overwrite=overwrite,
            hints=hints(facts),
            **{name: facts[name] for name in _AS_THEY_ARE},
        )
        with showing_failures(console), console.status("Starting") as status:
            report = exporter.export(model, output, options, status.update)
    print_report(report, Console())


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@import_options
def inspect(file: Path, **facts: Any) -> None:
    """Show what FILE holds, what its shapes tell, and which flags an export needs."""
    from rich.console import Console

    from qrnn_export.inspection import inspect_file
    from qrnn_export.report import print_inspection

    with friendly_errors():
        found: Inspection = inspect_file(file, hints(facts), trust_pickle=facts["trust_pickle"])
    print_inspection(file, found, Console())


@main.command()
@click.argument("artefact", type=click.Path(path_type=Path))
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="The checkpoint that ARTEFACT was made from; left out, the weights in ARTEFACT itself.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compare on the first rows of this Parquet file too.",
)
@click.option(
    "--column", default="features", show_default=True, help="The column of --data with the rows."
)
@device_option
@import_options
def verify(
    artefact: Path, against: Path | None, data: Path | None, column: str, **facts: Any
) -> None:
    """Prove ARTEFACT once more: here, now, with the versions that are installed.

    ARTEFACT is a .ts.pt, .onnx or .pt2 file, or the .stages.json of a model in stages. Checks that
    its files are those that were proven, and compares it with the module in a fresh process. The
    options from --trust-pickle on describe a foreign MODEL.

    Exit status: 0 proven, 1 the numbers differ, 2 bad input.
    """
    from rich.console import Console

    from qrnn_export import verification
    from qrnn_export.report import print_proof

    with friendly_errors(), showing_failures(Console(stderr=True)):
        proof = verification.verify(
            artefact,
            against,
            data,
            column=column,
            hints=hints(facts),
            trust_pickle=facts["trust_pickle"],
            devices=facts["devices"],
        )
    print_proof(proof, Console())


@main.command("ops-library")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="libqrnn_torch_ops.so",
    show_default=True,
    metavar="FILE",
    help="The library to write.",
)
@click.option("--overwrite", is_flag=True, help="Replace a file that exists.")
def ops_library(output: Path, overwrite: bool) -> None:
    """Build the operators for C++ programs: TorchScript files then run without Python.

    Compiles one source file with your C++ compiler (CXX, or c++) against the installed torch,
    links the kernels in, and checks the numbers in a fresh process. Nothing is downloaded. The
    library runs on CPUs and GPUs, and loads in torch 2.10 and newer, whichever built it.

    \b
    Use:
      dlopen("./libqrnn_torch_ops.so", RTLD_NOW)          a C++ program, before torch::jit::load
      LD_PRELOAD=./libqrnn_torch_ops.so tritonserver ...  Triton's PyTorch backend

    Files of `qrnn-export --portable` need no library, and are slower.

    Exit status: 0 built and checked, 1 it does not compute rightly, 2 no compiler, torch too old,
    or FILE cannot be written.
    """  # noqa: D301  (click reads the backspace as "do not reflow")
    from rich.console import Console

    from qrnn_export.ops_library import build_ops_library

    status = Console(stderr=True).status("Starting")
    with friendly_errors(), terminating_cleanly(), status:
        built = build_ops_library(output, overwrite=overwrite, progress=status.update)
    click.echo(f"wrote {built.path}, built with torch {built.torch_version} and {built.compiler}")


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn our errors and those of the file system into one message and an exit status."""
    try:
        yield
    except (ParityError, KernelError) as error:
        _exit(error, _EXIT_PROOF_FAILED)
    except QRNNError as error:
        _exit(error, _EXIT_BAD_INPUT)
    except OSError as error:
        advice = "; nothing was written. Make room, or write elsewhere with -o DIR"
        _exit(f"{error}{advice if error.errno in _NO_ROOM else ''}", _EXIT_BAD_INPUT)


@contextmanager
def showing_failures(console: Console) -> Iterator[None]:
    """Print the parity table of a proof that failed, and raise on."""
    try:
        yield
    except ParityError as error:
        if error.proof is not None:
            from qrnn_export.report import parity_table

            console.print(parity_table(error.proof))
        raise


@contextmanager
def terminating_cleanly() -> Iterator[None]:
    """Let SIGTERM unwind the program, so that temporary files are removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_EXIT_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(error: Exception | str, status: int) -> None:
    click.echo(f"qrnn-export: {error}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
