"""`qrnn-score`: scores a table file against a running server."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypedDict, Unpack

import click
from rich import progress as bars
from rich.console import Console
from rich.text import Text

from qrnn_client._batch import Batching
from qrnn_client._channel import TLS
from qrnn_client._client import Client
from qrnn_client._errors import ClientError
from qrnn_client._retry import RetryPolicy
from qrnn_client._session import DEFAULT_TIMEOUT_S
from qrnn_protos.v1.limits import DEFAULT_PORT

if TYPE_CHECKING:
    from qrnn_client._score import Progress, ScoreReport

SOME_ROWS_FAILED = 3

_BATCHING = Batching()
_RETRY = RetryPolicy()
_SECONDS = click.FloatRange(min=0, min_open=True, max=1e9)
_PEM = click.Path(exists=True, dir_okay=False)

_EPILOG = """
\b
Examples:
  qrnn-score utterances.parquet scores.parquet --model vowels
  qrnn-score events.arrow scores.arrow --target 10.0.0.5:8001 --id-column account
  qrnn-score big.parquet scores.parquet --target 10.0.0.5:8001,10.0.0.6:8001

\b
Exit status:
  0  every row was scored
  1  something failed; no output was written
  2  the command line is wrong
  3  the output is whole, but some rows have an error in place of a score
"""


class _Settings(TypedDict):
    """The options, as click gives them."""

    target: str
    model: str
    id_column: str
    column: str | None
    overwrite: bool
    batch_rows: int
    in_flight: int
    timeout_s: float
    retries: int
    retry_s: float
    wait: bool
    half: bool
    tls: bool
    tls_root: str | None
    tls_key: str | None
    tls_cert: str | None
    quiet: bool


@click.command(epilog=_EPILOG, context_settings={"show_default": True, "max_content_width": 100})
@click.argument("input_path", metavar="INPUT", type=click.Path(path_type=Path))
@click.argument("output_path", metavar="OUTPUT", type=click.Path(path_type=Path))
@click.option(
    "--target",
    metavar="HOST:PORT",
    default=f"127.0.0.1:{DEFAULT_PORT}",
    help="The server. Several IP:PORT with commas between share the work.",
)
@click.option("--model", default="", help="Name of the model; not needed when only one is loaded.")
@click.option("--id-column", default="id", help="Column that is copied to the output.")
@click.option(
    "--column",
    help='Column with the sequences: "features", or else the only list column that fits the model.',
)
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it exists.")
@click.option(
    "--batch-rows",
    type=click.IntRange(min=1),
    default=_BATCHING.max_rows,
    help="Most rows of one call; calls are cut by bytes and timesteps too.",
)
@click.option(
    "--in-flight",
    type=click.IntRange(min=1),
    default=_BATCHING.in_flight,
    help="Calls under way at a time.",
)
@click.option(
    "--timeout-s",
    type=_SECONDS,
    default=DEFAULT_TIMEOUT_S,
    help="Most seconds for one answer to one call.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=_RETRY.max_attempts - 1,
    help="Most times a call is sent again after it failed.",
)
@click.option(
    "--retry-s",
    type=_SECONDS,
    default=_RETRY.total_s,
    help="Most seconds for one call with everything; how long a server may be away.",
)
@click.option("--wait", is_flag=True, help="Wait --retry-s for a server that is still starting.")
@click.option(
    "--half",
    is_flag=True,
    help="Send features and get scores as float16: half the bytes, on slow networks.",
)
@click.option("--tls", is_flag=True, help="Encrypt, and trust the usual authorities.")
@click.option("--tls-root", type=_PEM, help="Encrypt, and trust the authorities in this PEM file.")
@click.option("--tls-key", type=_PEM, help="This client's own key, with --tls-cert.")
@click.option("--tls-cert", type=_PEM, help="This client's own certificate, with --tls-key.")
@click.option("--quiet", is_flag=True, help="Print errors only.")
@click.version_option(package_name="qrnn-serve")
def main(input_path: Path, output_path: Path, **settings: Unpack[_Settings]) -> None:
    r"""Score every row of INPUT with a model on a qrnn-serve server, into OUTPUT.

    INPUT is a Parquet, Arrow or Feather file with a column of ids and a list column of sequences:
    lists of feature lists, or lists of token ids, of any lengths. OUTPUT (.parquet, .arrow or
    .feather) has the same rows in the same order, with the columns

    \b
      id     as in INPUT, also where ids repeat
      score  list of the model's outputs (a list a timestep for such models)
      error  why the row was not scored, or null

    Calls that fail are sent again, so a server may restart meanwhile. OUTPUT appears only when it
    is whole.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with (
            _stopped_by_sigterm(),
            _client(settings) as client,
            _progress_bar(console, shown=not settings["quiet"]) as progress,
        ):
            report = client.score(
                settings["model"],
                input_path,
                output_path,
                id_column=settings["id_column"],
                input_column=settings["column"],
                overwrite=settings["overwrite"],
                progress=progress,
            )
    except ClientError as error:
        console.print(f"qrnn-score: {error}", style="bold red", markup=False)
        sys.exit(1)
    _report(console, report, output_path, quiet=settings["quiet"])
    if report.failed:
        sys.exit(SOME_ROWS_FAILED)


def _client(settings: _Settings) -> Client:
    tls = None
    if settings["tls"] or settings["tls_root"] or settings["tls_key"] or settings["tls_cert"]:
        tls = TLS(
            root_certificates=settings["tls_root"],
            private_key=settings["tls_key"],
            certificate=settings["tls_cert"],
        )
    return Client(
        settings["target"],
        timeout_s=settings["timeout_s"],
        retry=RetryPolicy(max_attempts=settings["retries"] + 1, total_s=settings["retry_s"]),
        batching=Batching(max_rows=settings["batch_rows"], in_flight=settings["in_flight"]),
        wait_for_ready=settings["wait"],
        half=settings["half"],
        tls=tls,
    )


def _report(console: Console, report: ScoreReport, output_path: Path, *, quiet: bool) -> None:
    if report.failed:
        console.print(
            f"{report.failed:,} of {report.rows:,} rows have an error in place of a score; first:",
            style="bold yellow",
        )
        for error in report.first_errors:
            console.print(f"  {error}", markup=False)
    if not quiet:
        rate = report.rows / max(report.elapsed_s, 1e-9)
        console.print(
            f"{report.rows:,} rows in {report.elapsed_s:.1f} s ({rate:,.0f} rows/s) by "
            f"{report.model.name} version {report.model.version}: {output_path}",
            markup=False,
        )


@contextlib.contextmanager
def _progress_bar(
    console: Console, *, shown: bool
) -> Generator[Callable[[Progress], None], None, None]:
    columns = (
        bars.TextColumn("scoring"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        _RateColumn(),
        bars.TimeRemainingColumn(),
    )
    if not (shown and console.is_terminal):
        yield lambda progress: None
        return
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task("scoring", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.rows, total=progress.total)

        yield show


class _RateColumn(bars.ProgressColumn):
    """Rows a second."""

    def render(self, task: bars.Task) -> Text:
        """Return the text."""
        return Text("" if task.speed is None else f"{task.speed:,.0f} rows/s")


@contextlib.contextmanager
def _stopped_by_sigterm() -> Generator[None, None, None]:
    """Let SIGTERM end the job as Ctrl-C does, so that nothing half-written stays behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise click.Abort

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
