"""Files in, files out: every row once, in order, with its id, and never half a file."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
import threading

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from qrnn_client import (
    Batching,
    Client,
    FileError,
    InvalidRequestError,
    ModelChangedError,
    _score,
    _tables,
)
from qrnn_client.testing import FakeModel, FakeServer

FEATURES = pa.list_(pa.list_(pa.float32(), 3))


def table_of(rows, ids=None, features_type=FEATURES, **columns):
    rows = [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]
    features = pa.array(rows, features_type)
    ids = pa.array([f"row {i}" for i in range(len(rows))]) if ids is None else ids
    return pa.table({"id": ids, "features": features, **columns})


def write(table, path):
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, path)
    elif path.suffix == ".stream":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return path


def read(path):
    if path.suffix == ".parquet":
        return pq.read_table(path)
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a few rows, so that small files have many."""
    monkeypatch.setattr(_score, "_PIECE", Batching(max_rows=4))
    monkeypatch.setattr(_tables, "_MAX_PIECE_ROWS", 10)


@pytest.fixture
def score(client, tmp_path):
    """Score a table; return the output and the report."""

    def run(table, name="in.parquet", output="out.parquet", **options):
        report = client.score("sums", write(table, tmp_path / name), tmp_path / output, **options)
        return read(tmp_path / output), report

    return run


@pytest.mark.parametrize("output", ["out.parquet", "out.arrow", "out.feather"])
@pytest.mark.parametrize("name", ["in.parquet", "in.arrow", "in.feather", "in.stream"])
def test_score_reads_and_writes_every_format(score, make_rows, assert_scored, name, output):
    """Whatever the formats, the output has the input's rows and ids and the right scores."""
    rows = make_rows(3, 1, 7)

    scores, report = score(table_of(rows), name, output)

    assert scores.column_names == ["id", "score", "error"]
    assert scores["id"].to_pylist() == ["row 0", "row 1", "row 2"]
    assert scores["error"].to_pylist() == [None] * 3
    assert_scored(scores["score"].to_pylist(), rows)
    assert (report.rows, report.failed, report.first_errors) == (3, 0, ())


def test_score_says_in_the_file_which_model_it_was(score, make_rows):
    """Model, version, weights and the name of the output travel in the file."""
    scores, report = score(table_of(make_rows(1)))

    assert scores.schema.metadata == {
        b"qrnn.model": b"sums",
        b"qrnn.version": b"1",
        b"qrnn.weights_sha256": b"sha256 of sums 1",
        b"qrnn.output_name": b"output",
    }
    assert report.model.name == "sums"


def test_score_keeps_order_over_many_calls(
    server, small_pieces, tmp_path, make_rows, assert_scored
):
    """Many pieces, many calls, the first answered last: rows and scores stay together."""
    rows = make_rows(*(1 + number % 6 for number in range(50)))
    write(table_of(rows), tmp_path / "in.parquet")
    hold = server.hold_next()

    def release_late():
        server.wait_for_answers(3)
        hold.release()

    releasing = threading.Thread(target=release_late)
    releasing.start()
    seen = []
    with Client(server.target, batching=Batching(max_rows=2, in_flight=4)) as client:
        report = client.score(
            "sums", tmp_path / "in.parquet", tmp_path / "out.parquet", progress=seen.append
        )
    releasing.join()

    scores = pq.read_table(tmp_path / "out.parquet")
    assert scores["id"].to_pylist() == [f"row {number}" for number in range(50)]
    assert_scored(scores["score"].to_pylist(), rows)
    assert report.calls == report.attempts == len(server.calls) >= 25
    done = [progress.rows for progress in seen]
    assert done == sorted(set(done))
    assert done[-1] == 50
    assert len(done) >= 13
    assert {progress.total for progress in seen} == {50}


def test_score_reads_only_as_far_as_it_sends(
    server, small_pieces, tmp_path, make_rows, monkeypatch
):
    """While the first answer is out, no more is read than fills the calls under way."""
    monkeypatch.setattr(_tables._ParquetReader, "_piece_rows", lambda self, columns: 4)
    write(table_of(make_rows(*[1] * 400)), tmp_path / "in.parquet")
    pieces = []
    plan_calls = _score.plan_calls
    monkeypatch.setattr(
        _score, "plan_calls", lambda *arguments: pieces.append(1) or plan_calls(*arguments)
    )
    hold = server.hold_next()
    counts = []

    def release_late():
        server.wait_for_answers(2)
        counts.append(len(pieces))
        hold.release()

    releasing = threading.Thread(target=release_late)
    releasing.start()
    with Client(server.target, batching=Batching(in_flight=3)) as client:
        client.score("sums", tmp_path / "in.parquet", tmp_path / "out.parquet")
    releasing.join()

    assert len(pieces) == 100
    assert counts[0] <= 3


@pytest.mark.parametrize("output", ["out.parquet", "out.arrow"])
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(pa.array(["a", "b", "a"]), id="duplicates"),
        pytest.param(pa.array(["ümlaut", "日本語 \U0001f5e3", ""]), id="unicode"),
        pytest.param(pa.array(["x", None, "z"]), id="nulls"),
        pytest.param(pa.array(["x", "y", "z"], pa.large_string()), id="large-string"),
        pytest.param(pa.array([b"\x00\xff", b"", b"\xfe"]), id="binary"),
        pytest.param(pa.array([2**63 - 1, -(2**63), 0]), id="int64"),
        pytest.param(pa.array([2**64 - 1, 0, 1], pa.uint64()), id="uint64"),
        pytest.param(pa.array([1, 2, 3], pa.int8()), id="int8"),
        pytest.param(pa.array([float("nan"), -0.0, 1e300]), id="double"),
        pytest.param(
            pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("2.20")]), id="decimal"
        ),
        pytest.param(pa.array([b"0123456789abcdef"] * 3, pa.binary(16)), id="fixed-binary"),
        pytest.param(
            pa.array([datetime.datetime(2020, 2, 29, 1, 2, 3, 4)] * 3, pa.timestamp("us", "UTC")),
            id="timestamp",
        ),
        pytest.param(pa.array([{"a": 1, "b": "x"}] * 3), id="struct"),
        pytest.param(pa.array([["p", "q"], [], None]), id="list"),
    ],
)
def test_score_copies_ids_exactly(score, make_rows, ids, output):
    """Ids of any type keep type and value, also when they repeat or are null."""
    scores, _ = score(table_of(make_rows(1, 2, 3), ids), output=output)

    assert scores["id"].type == ids.type
    assert scores["id"].combine_chunks().equals(ids) or ids.type == pa.float64()
    assert str(scores["id"].to_pylist()) == str(ids.to_pylist())


@pytest.mark.parametrize("output", ["out.parquet", "out.arrow"])
def test_score_of_ids_in_dictionaries(score, small_pieces, make_rows, output):
    """Dictionary-encoded ids come out as the values they stand for."""
    ids = pa.array(["x", "y", None, "x"] * 5 + ["q"])
    table = table_of(make_rows(*[1] * 21), ids.dictionary_encode())

    scores, _ = score(table, "in.arrow", output)

    assert scores["id"].type == pa.string()
    assert scores["id"].to_pylist() == [*(["x", "y", None, "x"] * 5), "q"]


@pytest.mark.parametrize("output", ["out.parquet", "out.arrow"])
def test_score_gives_bad_rows_their_error(score, small_pieces, make_rows, assert_scored, output):
    """Nulls, empty rows and rows that the server refuses have an error; the others are scored."""
    rows = [*make_rows(2, 1, 3), None, [], *make_rows(2), [[1, 2, float("nan")]], *make_rows(4)]
    rows.append([[1, 2, 3], None])

    # A timestep of fixed size cannot be null in Parquet files that older pyarrow releases read.
    table = table_of(rows, features_type=pa.list_(pa.list_(pa.float32())))
    scores, report = score(table, output=output)

    bad = [3, 4, 6, 8]
    assert report.failed == 4
    assert [error.row for error in report.first_errors] == bad
    texts = scores["error"].to_pylist()
    assert [place for place, text in enumerate(texts) if text] == bad
    assert texts[3] == "INVALID_ARGUMENT: values: expected features [T, 3] float32, got null"
    assert "at least 1 timestep" in texts[4]
    assert "finite" in texts[6]
    assert texts[8].startswith("INVALID_ARGUMENT: timestep 1: ")
    values = scores["score"].to_pylist()
    assert [place for place, value in enumerate(values) if value is None] == bad
    good = [place for place in range(len(rows)) if place not in bad]
    assert_scored([values[place] for place in good], [rows[place] for place in good])


def test_score_when_no_row_can_be_sent(score, server, small_pieces):
    """A file of bad rows only: all errors, no call, and a whole file."""
    scores, report = score(table_of([None] * 30))

    assert scores.num_rows == report.rows == report.failed == 30
    assert [error.row for error in report.first_errors] == [0, 1, 2, 3, 4]
    assert server.calls == []


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow", "in.stream"])
@pytest.mark.parametrize("rows", [0, 1])
def test_score_of_few_rows(score, make_rows, name, rows):
    """No row gives an output without rows, of the right types; one row gives one."""
    ids = pa.array(["x"] * rows, pa.string())

    scores, report = score(table_of(make_rows(*[2] * rows), ids), name)

    assert scores.num_rows == report.rows == rows
    assert scores.schema.types == [pa.string(), pa.list_(pa.float32()), pa.string()]


@pytest.mark.parametrize(
    "features_type",
    [
        pa.list_(pa.list_(pa.float64())),
        pa.large_list(pa.list_(pa.float32(), 3)),
        pa.list_(pa.list_(pa.float32()), 2),
        pa.list_(pa.list_(pa.int16())),
    ],
    ids=str,
)
def test_score_of_every_list_type(score, rng, assert_scored, features_type):
    """Lists of lists of any size type and number type are rows of features."""
    rows = [rng.integers(-9, 9, (2, 3)) for _ in range(3)]

    scores, _ = score(table_of(rows, features_type=features_type), "in.arrow")

    assert_scored(scores["score"].to_pylist(), rows)


def test_score_of_token_ids(tmp_path):
    """A column of id lists is scored by a model of ids."""
    model = FakeModel(score=lambda row: row.sum(), vocabulary_size=100)
    rows = [[1, 2, 3], [7], [50, 50]]
    table = pa.table({"id": [1, 2, 3], "tokens": pa.array(rows, pa.list_(pa.int32()))})
    write(table, tmp_path / "in.parquet")

    with FakeServer(model) as server, Client(server.target) as client:
        client.score("", tmp_path / "in.parquet", tmp_path / "out.parquet")

    assert pq.read_table(tmp_path / "out.parquet")["score"].to_pylist() == [[6], [7], [100]]


def test_score_per_timestep(tmp_path, make_rows):
    """A model with one vector a timestep gives each row a list of lists."""
    model = FakeModel(
        score=lambda row: row[:, :2], input_size=3, output_size=2, output_per_timestep=True
    )
    rows = [*make_rows(3, 1), None, *make_rows(2)]
    write(table_of(rows), tmp_path / "in.parquet")

    with FakeServer(model) as server, Client(server.target) as client:
        client.score("model", tmp_path / "in.parquet", tmp_path / "out.parquet")

    scores = pq.read_table(tmp_path / "out.parquet")["score"].to_pylist()
    assert scores == [None if row is None else row[:, :2].tolist() for row in rows]


def test_score_finds_the_only_list_column(score, make_rows, assert_scored):
    """Another name is found when it is the only column that fits, or when it is given."""
    rows = make_rows(1, 2)
    frames = table_of(rows)["features"]
    speech = pa.table({"key": ["a", "b"], "frames": frames, "words": [["x"], ["y"]]})

    scores, _ = score(speech, id_column="key")
    both = speech.append_column("more", frames)
    named, _ = score(both, output="named.parquet", id_column="key", input_column="more")

    assert_scored(scores["score"].to_pylist(), rows)
    assert_scored(named["score"].to_pylist(), rows)
    with pytest.raises(FileError, match=r"--column.*\['frames', 'more'\]"):
        score(both, output="none.parquet", id_column="key")


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"id": [1], "features": [1.0]}, {}, "'features' cannot hold features .* it is double"),
        ({"id": [1], "features": [[1, 2]]}, {}, "it is list<.*int64>, not list<list<float>>"),
        ({"id": [1], "x": ["a"]}, {}, "no column holds features .*: id is int64, x is string"),
        ({"key": [1], "features": [[[1.0] * 3]]}, {}, "no column 'id'; it has key, features"),
        ({"id": [1], "features": [[[1.0]]]}, {"input_column": "f"}, "no column 'f'"),
        ({"error": [1], "features": [[[1.0]]]}, {"id_column": "error"}, "an output column is"),
    ],
)
def test_score_refuses_columns_that_do_not_fit(score, server, tmp_path, columns, options, message):
    """A table without the right columns is refused before anything is sent or written."""
    with pytest.raises(FileError, match=message):
        score(pa.table(columns), **options)

    assert server.calls == []
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_score_refuses_fixed_lists_of_another_width(score):
    """A width that the column's type states is refused at once, not row by row."""
    features = pa.array([[[1.0] * 4]], pa.list_(pa.list_(pa.float32(), 4)))

    with pytest.raises(FileError, match=r"features \[T, 3\] float32 .*it has 4 values a timestep"):
        score(pa.table({"id": [1], "features": features}))


def test_score_refuses_a_name_that_stands_twice(score):
    """Which of two columns is meant cannot be guessed."""
    table = pa.table([pa.array([1]), pa.array([2]), pa.array([[[1.0]]])], ["id", "id", "features"])

    with pytest.raises(FileError, match="several columns 'id'"):
        score(table, "in.arrow")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"", "expected a Parquet, Arrow or Feather"),
        (b"id,features\n1,2\n", "it begins with b'id,fea'"),
        (b"FEA1 old feather", "Feather .version 2."),
        (b"PAR1 and then nothing", "cannot read"),
        (b"ARROW1 and then nothing", "cannot read"),
        (b"\xff\xff\xff\xff\x10\x00", "cannot read"),
    ],
)
def test_score_of_a_file_that_is_no_table(client, tmp_path, content, message):
    """A missing, damaged or foreign file is named, with what was expected."""
    path = tmp_path / "in.parquet"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(FileError, match=rf"in\.parquet.*{message}|{message}"):
        client.score("sums", path, tmp_path / "out.parquet")

    assert not (tmp_path / "out.parquet").exists()


def test_score_of_a_truncated_file(score, client, tmp_path, make_rows):
    """A Parquet file whose end is missing is refused."""
    path = write(table_of(make_rows(3, 4)), tmp_path / "whole.parquet")
    (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:-20])

    with pytest.raises(FileError, match=r"cannot read .*cut\.parquet"):
        client.score("sums", tmp_path / "cut.parquet", tmp_path / "out.parquet")


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
def test_score_of_a_file_damaged_in_the_middle(client, small_pieces, tmp_path, make_rows, name):
    """Damage that shows only while reading leaves no output."""
    table, path = table_of(make_rows(*[50] * 200)), tmp_path / name
    if name == "in.parquet":
        pq.write_table(table, path, write_page_checksum=True, compression=None)
    else:
        write(table, path)
    content = bytearray(path.read_bytes())
    content[8:20_000] = b"\x07" * 19_992
    path.write_bytes(content)

    with pytest.raises(FileError, match="cannot read"):
        client.score("sums", path, tmp_path / "out.parquet")

    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("out.csv", "ends in one of .parquet, .pq, .arrow"),
        ("missing/out.parquet", "there is no folder"),
        ("folder.parquet", "not a file"),
        ("old.parquet", "--overwrite"),
    ],
)
def test_score_refuses_an_output_before_it_sends(
    score, server, tmp_path, make_rows, output, message
):
    """An output that cannot or should not be written is refused before any row is scored."""
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "old.parquet").write_bytes(b"old")

    with pytest.raises(FileError, match=message):
        score(table_of(make_rows(1)), output=output)

    assert server.calls == []
    assert (tmp_path / "old.parquet").read_bytes() == b"old"


def test_score_overwrites_when_asked(score, tmp_path, make_rows):
    """The old file is replaced, but never the input."""
    (tmp_path / "out.parquet").write_bytes(b"old")

    scores, _ = score(table_of(make_rows(1)), overwrite=True)

    assert scores.num_rows == 1
    with pytest.raises(FileError, match="it is the input file"):
        score(table_of(make_rows(1)), "out.parquet", overwrite=True)


def test_score_that_fails_leaves_the_old_file(score, server, small_pieces, tmp_path, make_rows):
    """A job that fails in the middle leaves what was there, and nothing half-written."""
    (tmp_path / "out.parquet").write_bytes(b"old")
    server.pass_next(3)
    server.fail_next(grpc.StatusCode.INVALID_ARGUMENT, "refused")

    with pytest.raises(InvalidRequestError, match="refused"):
        score(table_of(make_rows(*[1] * 40)), overwrite=True)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]
    assert (tmp_path / "out.parquet").read_bytes() == b"old"


def test_score_that_is_interrupted_leaves_nothing(score, server, small_pieces, tmp_path, make_rows):
    """An exception from the caller's own progress function ends the job cleanly."""

    def interrupt(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(table_of(make_rows(*[1] * 40)), progress=interrupt)

    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_score_when_the_disk_is_full(score, small_pieces, tmp_path, make_rows, monkeypatch):
    """An error of the system while writing is a FileError that names the output."""

    def fail(self, table, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fail)

    with pytest.raises(FileError, match=r"cannot write .*out\.parquet: .*No space left"):
        score(table_of(make_rows(1, 2)), "in.arrow")

    assert [path.name for path in tmp_path.iterdir()] == ["in.arrow"]


def test_score_keeps_to_one_version(score, server, small_pieces, tmp_path, make_rows):
    """A file is never scored by two versions: when the server switches, the job ends."""
    server.pass_next(2)
    server.tamper_next(lambda reply: setattr(reply, "version", "2"))

    with pytest.raises(ModelChangedError, match="version '2' answered"):
        score(table_of(make_rows(*[1] * 40)))

    assert {call.version for call in server.calls} == {"1"}
    assert not (tmp_path / "out.parquet").exists()


def test_score_cuts_pieces_by_the_size_of_the_scores(tmp_path, make_rows, monkeypatch):
    """Small rows with large scores are written in small pieces too."""
    monkeypatch.setattr(_score, "_PIECE", Batching(max_bytes=100_000, max_rows=1 << 30))
    model = FakeModel(score=lambda row: np.zeros(10_000), input_size=3, output_size=10_000)
    write(table_of(make_rows(*[1] * 20)), tmp_path / "in.parquet")
    seen = []

    with FakeServer(model) as server, Client(server.target) as client:
        client.score(
            "model", tmp_path / "in.parquet", tmp_path / "out.parquet", progress=seen.append
        )

    assert [progress.rows for progress in seen] == list(range(2, 21, 2))


def test_score_writes_row_groups_of_useful_size(score, make_rows, monkeypatch, tmp_path):
    """Many small pieces end in few row groups."""
    monkeypatch.setattr(_score, "_PIECE", Batching(max_rows=4))

    score(table_of(make_rows(*[1] * 200)))

    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 1


READ_ALL = """
import pyarrow as pa
from pathlib import Path
from qrnn_client import _tables
_tables.PIECE_BYTES = 1 << 20
with _tables.open_table(Path({path!r})) as table:
    rows = sum(batch.num_rows for batch in table.batches(["id", "features"]))
print(rows, pa.default_memory_pool().max_memory())
"""


def test_score_reads_large_row_groups_in_pieces(tmp_path, rng):
    """Memory does not grow with the file, also where the whole file is one row group."""
    numbers = pa.array(rng.standard_normal(12_000_000, dtype=np.float32))
    frames = pa.FixedSizeListArray.from_arrays(numbers, 100)
    features = pa.ListArray.from_arrays(pa.array(range(0, 120_001, 30), pa.int32()), frames)
    path = tmp_path / "in.parquet"
    table = pa.table({"id": list(range(4000)), "features": features})
    pq.write_table(table, path, row_group_size=4000)

    done = subprocess.run(
        [sys.executable, "-c", READ_ALL.format(path=str(path))],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )

    rows, peak_bytes = map(int, done.stdout.split())
    assert rows == 4000
    assert peak_bytes < path.stat().st_size / 2
