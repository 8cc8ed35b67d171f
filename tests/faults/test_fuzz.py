"""A share of benchmarks/fuzz.py: random and damaged messages, in process and at a real server."""

from __future__ import annotations

import pytest

import fuzz
import fuzzing
from qrnn_protos.v1.limits import MAX_MESSAGE_BYTES
from qrnn_serve import save
from qrnn_serve.core.errors import InputError
from qrnn_serve.server import codec
from served import serving

SEED = 20161105


def check_messages(count):
    fuzzer, checker = fuzzing.Fuzzer(SEED), fuzzing.Checker()
    for number in range(count):
        schema = fuzzing.SCHEMAS[number % len(fuzzing.SCHEMAS)]
        checker.check(fuzzer.message(schema), schema)
    return checker


def test_decoder_reads_damaged_messages_as_protobuf_does_or_refuses_them():
    """Every row of what is read comes out once and right; all else is an error for the caller."""
    checker = check_messages(4000)

    assert checker.slowest_s < fuzz.MOST_SECONDS
    assert min(checker.ends.values()) > 100
    assert set(checker.ends) >= {"decoded", "rows refused", "FieldError", "InputError"}


def test_fuzzer_finds_a_check_that_is_missing(monkeypatch):
    """Without the checks of rows, wrong ones come through, and that is a finding."""
    monkeypatch.setattr(codec, "find_row_problems", lambda *_: [])

    with pytest.raises(fuzzing.Finding, match="other rows are good"):
        check_messages(4000)


def test_damaged_messages_never_end_the_server(tmp_path):
    """A thousand messages and raw bytes get a known status each; the server scores on, right."""
    model = fuzz.small_model()
    save(model, tmp_path / "model.pt")
    with serving(tmp_path / "model.pt", tmp_path / "log") as served:
        before = served.process.memory_info().rss
        ends = fuzz.fuzz_server(served, model, 1000, SEED)
        grown = served.process.memory_info().rss - before

    assert ends["OK"] > 50
    assert ends["INVALID_ARGUMENT"] > 100
    assert grown < fuzz.MOST_GROWTH_BYTES


@pytest.mark.parametrize("field", ["values", "request_id"])
def test_large_messages_of_anything_but_data_are_refused_before_they_are_parsed(field):
    """protobuf takes 17 times the bytes of a shape of ones; it is given no more than 4 MiB."""
    message = codec.pb.PredictRequest(request_id="x" * (5 << 20))
    if field == "values":
        message = codec.pb.PredictRequest(values={"shape": [1] * (5 << 20)})

    with pytest.raises(InputError, match="at most 4194304 bytes beside the data"):
        codec.parse(message.SerializeToString()[:MAX_MESSAGE_BYTES])
