"""The command qrnn-score."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from rich.console import Console

from qrnn_client import Batching, cli
from qrnn_client.testing import FakeModel, FakeServer
from qrnn_protos.v1 import limits

ENVIRONMENT = {"PYTHONPATH": ":".join(filter(None, sys.path))}
FEATURES = pa.list_(pa.list_(pa.float32(), 3))


@pytest.fixture
def input_path(tmp_path, make_rows):
    rows = [row.tolist() for row in make_rows(2, 1, 5, 3)]
    table = pa.table({"id": list("abcd"), "features": pa.array(rows, FEATURES)})
    pq.write_table(table, tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


@pytest.fixture
def run(server, tmp_path, input_path):
    """Run the command on a file of four rows."""

    def run(*options, target=None, output="out.parquet"):
        paths = [str(input_path), str(tmp_path / output)]
        return CliRunner().invoke(cli.main, [*paths, "--target", target or server.target, *options])

    return run


def make_bad(path):
    rows = [[[1.0, 2.0, 3.0]], None, [], [[1.0, 1.0, float("nan")]]] + [None] * 6
    table = pa.table({"id": list(range(10)), "features": pa.array(rows, FEATURES)})
    pq.write_table(table, path)


def test_command_scores_a_file(run, tmp_path):
    """Exit status 0, the whole output, and one line that says what was done."""
    done = run("--model", "sums")

    assert done.exit_code == 0
    assert pq.read_table(tmp_path / "out.parquet")["id"].to_pylist() == list("abcd")
    assert done.stdout == ""
    assert re.fullmatch(
        r"4 rows in \d+\.\d s \(\S+ rows/s\) by sums version 1: .*out\.parquet\n", done.stderr
    )


def test_command_needs_no_model_name_where_one_is_loaded(run):
    """One model on the server: its name is not needed."""
    assert run().exit_code == 0


def test_command_reports_rows_that_failed(run, input_path, tmp_path):
    """Exit status 3, the whole output, how many rows failed and the first of them."""
    make_bad(input_path)

    done = run()

    assert done.exit_code == cli.SOME_ROWS_FAILED == 3
    lines = done.stderr.splitlines()
    assert lines[0] == "9 of 10 rows have an error in place of a score; first:"
    assert lines[1] == "  row 1: values: expected features [T, 3] float32, got null"
    assert [line.split(":")[0] for line in lines[1:6]] == [f"  row {i}" for i in range(1, 6)]
    assert lines[6].startswith("10 rows in ")
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 10


def test_command_can_be_quiet(run, input_path):
    """With --quiet a success prints nothing, and errors are still told."""
    assert run("--quiet").output == ""
    make_bad(input_path)
    assert run("--quiet", "--overwrite").stderr.startswith("9 of 10 rows")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "other"], r"no model 'other'; loaded: 'sums' version '1'"),
        (["--id-column", "key"], r"no column 'key'; it has id, features"),
        (["--column", "id"], r"'id' cannot hold features \[T, 3\] float32 .*it is string"),
        (["--tls-key", __file__], r"go together"),
        (["--tls-root", __file__, "--retries", "2"], r"Check host, port and TLS"),
    ],
)
def test_command_fails_with_a_message(run, tmp_path, options, message):
    """Exit status 1, no output, one message and no traceback."""
    done = run(*options)

    assert done.exit_code == 1
    assert re.search(rf"^qrnn-score: .*{message}", done.stderr)
    assert "Traceback" not in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_command_without_a_server(run, tmp_path):
    """Nobody at the address: exit status 1, and what to try."""
    with FakeServer() as stopped:
        target = stopped.target

    done = run("--retries", "1", target=target)

    assert done.exit_code == 1
    assert re.search(rf"qrnn-score: {target}: UNAVAILABLE .*Is the server running", done.stderr)


def test_command_keeps_what_exists(run, tmp_path):
    """An output that exists is kept unless --overwrite is given."""
    (tmp_path / "out.parquet").write_bytes(b"old")

    refused = run()
    kept = (tmp_path / "out.parquet").read_bytes()
    allowed = run("--overwrite")

    assert (refused.exit_code, kept, allowed.exit_code) == (1, b"old", 0)
    assert "--overwrite" in refused.stderr


def test_command_retries(run, server):
    """A server that is full for a moment is asked again; --retries 0 asks once."""
    server.fail_next(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=0, times=2)
    assert run().exit_code == 0

    server.fail_next(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=0)
    assert "full" in run("--retries", "0", "--overwrite").stderr


def test_command_cuts_calls_as_told(run, server):
    """--batch-rows and --timeout-s reach the server."""
    run("--batch-rows", "3", "--timeout-s", "33")

    assert sorted(len(call.lengths) for call in server.calls) == [1, 3]
    assert all(20 < call.timeout_s < 34 for call in server.calls)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["in"],
        ["in", "out", "--batch-rows", "0"],
        ["in", "out", "--timeout-s", "0"],
        ["in", "out", "--retries", "-1"],
        ["in", "out", "--tls-root", "none.pem"],
        ["in", "out", "--nonsense"],
    ],
)
def test_command_line_that_is_wrong(arguments):
    """Exit status 2 and what is wrong."""
    done = CliRunner().invoke(cli.main, arguments)

    assert done.exit_code == 2
    assert "Error: " in done.stderr


def test_help_teaches():
    """The help says what goes in and out, shows examples, defaults and exit statuses."""
    text = CliRunner().invoke(cli.main, ["--help"]).stdout

    for part in ("Parquet, Arrow or Feather", "score", "error", "Examples:", "Exit status:"):
        assert part in text
    assert f"127.0.0.1:{limits.DEFAULT_PORT}" in text
    assert str(Batching().max_rows) in text
    assert all(line.endswith("]") or len(line) <= 100 for line in text.splitlines())


def test_progress_bar_shows_rate_and_rest():
    """In a terminal a bar shows rows, rate and time left; elsewhere nothing."""
    from qrnn_client._score import Progress

    shown = {}
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=100, record=True, file=sys.stderr)
        with cli._progress_bar(console, shown=True) as update:
            for rows in (10, 20, 40):
                update(Progress(rows=rows, total=40, failed=0))
        shown[terminal] = console.export_text()

    assert "40/40" in shown[True]
    assert "rows/s" in shown[True]
    assert shown[False].strip() == ""


def test_command_that_is_terminated_leaves_nothing(server, input_path, tmp_path):
    """SIGTERM ends a real process with status 1, and nothing half-written stays."""
    hold = server.hold_next()
    code = "from qrnn_client.cli import main; main()"
    command = [sys.executable, "-c", code, str(input_path), str(tmp_path / "out.parquet")]
    process = subprocess.Popen(
        [*command, "--target", server.target], stderr=subprocess.PIPE, env=ENVIRONMENT
    )

    assert hold.arrived.wait(60)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert b"Traceback" not in errors
    assert hold.gone.wait(60)
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_command_prints_no_bar_into_a_pipe(server, input_path, tmp_path):
    """A real process whose output is no terminal prints the one line, in plain text."""
    code = "from qrnn_client.cli import main; main()"
    command = [sys.executable, "-c", code, str(input_path), str(tmp_path / "out.parquet")]
    done = subprocess.run(
        [*command, "--target", server.target],
        capture_output=True,
        check=True,
        timeout=120,
        env=ENVIRONMENT,
    )

    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1
    assert b"\x1b" not in done.stderr


def test_command_escapes_nothing_in_messages(tmp_path):
    """Brackets in names reach the reader as they are."""
    model = FakeModel(score=len, input_size=3, name="[bold]m[/bold]")
    table = pa.table({"id": [1], "features": pa.array([None], FEATURES)})
    pq.write_table(table, tmp_path / "in.parquet")

    with FakeServer(model) as server:
        paths = [str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet")]
        done = CliRunner().invoke(cli.main, [*paths, "--target", server.target])

    assert done.exit_code == 3
    assert "[bold]m[/bold] version 1" in done.stderr
