"""Random and damaged messages: through the decoder in process, then at a real server's socket.

    python benchmarks/fuzz.py [--inputs 100000] [--calls 5000] [--seed 0]

Ends with status 1 at the first message that is a finding, and prints it. Checked of each: it is
read as protobuf reads it, every row comes out once with its own numbers or an error, nothing but
the errors that callers are told of is raised. Of all: no call without a known status, processor
time of a message and growth of memory within bounds, and the server scores right afterwards.
"""

from __future__ import annotations

import argparse
import resource
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc
import numpy as np

from fuzzing import SCHEMAS, Checker, Fuzzer
from qrnn_client import Client
from qrnn_serve import SequenceModel, save
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from served import Served, serving

PREDICT = "/qrnn_serve.v1.PredictionService/Predict"
KNOWN_CODES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
MOST_SECONDS = 1.0
MOST_GROWTH_BYTES = 64 << 20
RAW_EVERY = 50


def fuzz_decoder(inputs: int, seed: int) -> None:
    """Messages through the decoder.

    Raises:
        Exception: A finding.
    """
    fuzzer, checker = Fuzzer(seed), Checker()
    started_bytes = 0
    for number in range(inputs):
        schema = SCHEMAS[number % len(SCHEMAS)]
        message = fuzzer.message(schema)
        try:
            checker.check(message, schema)
        except Exception:
            print(f"input {number} of seed {seed}, for {schema}: {message!r}", file=sys.stderr)
            raise
        if number == inputs // 100:
            started_bytes = peak_bytes()
        if (number + 1) % max(inputs // 10, 1) == 0:
            print(f"{number + 1} inputs: {dict(checker.ends)}", flush=True)
    grown = peak_bytes() - started_bytes
    print(f"slowest {checker.slowest_s * 1e3:.1f} ms of CPU, memory grew {grown / 2**20:.1f} MiB")
    if checker.slowest_s > MOST_SECONDS or grown > MOST_GROWTH_BYTES:
        raise RuntimeError(f"expected at most {MOST_SECONDS} s and {MOST_GROWTH_BYTES} bytes")


def fuzz_server(served: Served, model: SequenceModel, calls: int, seed: int) -> Counter[str]:
    """Messages, and now and then bytes that are no HTTP/2, to a server of a model of features.

    Returns:
        How many calls ended with each status.

    Raises:
        RuntimeError: A status that a caller must not see, an error in the log, or a wrong score.
    """
    fuzzer, ends = Fuzzer(seed), Counter[str]()
    random = np.random.default_rng(seed)
    host, port = served.target.rsplit(":", 1)
    with grpc.insecure_channel(served.target) as channel:
        predict = channel.unary_unary(PREDICT)
        for number in range(calls):
            if number % RAW_EVERY == 0:
                with socket.create_connection((host, int(port))) as raw:
                    raw.sendall(random.bytes(int(random.integers(1, 5000))))
            message = fuzzer.message(SCHEMAS[0])
            try:
                predict(message, timeout=60)
                code = "OK"
            except grpc.RpcError as error:
                code = error.code().name  # pyright: ignore[reportAttributeAccessIssue]
            ends[code] += 1
            if code not in KNOWN_CODES:
                raise RuntimeError(f"call {number} of seed {seed} ended with {code}: {message!r}")
    rows = [random.standard_normal((length, 3)).astype(np.float32) for length in (4, 1)]
    with Client(served.target) as client:
        outputs = client.predict("", rows).outputs
    for row, output in zip(rows, outputs, strict=True):
        expected = alone(model, row)
        if output is None or np.abs(output - expected).max() > 1e-5:
            raise RuntimeError(f"wrong score: expected {expected}, got {output}")
    if "unexpected error" in served.log or "Traceback" in served.log:
        raise RuntimeError(f"the log has an error: {served.log}")
    return ends


def small_model() -> SequenceModel:
    """A model that takes what SCHEMAS[0] describes, with a state of 5."""
    layer = LayerConfig(hidden_size=5, window=1)
    config = SequenceModelConfig(
        qrnn=QRNNConfig(input_size=3, layers=(layer,)), pooling="last", head_size=2
    )
    return SequenceModel(config).eval()


def alone(model: SequenceModel, row: np.ndarray) -> np.ndarray:
    """The score of one row by the model itself."""
    import torch

    with torch.inference_mode():
        return model(torch.from_numpy(row)[None])[0][0].numpy()


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Fuzz both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="messages in process")
    parser.add_argument("--calls", type=int, default=5_000, help="messages over a socket")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started_s = time.monotonic()
    fuzz_decoder(options.inputs, options.seed)
    model = small_model()
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model.pt")
        with serving(Path(folder) / "model.pt", Path(folder) / "log") as served:
            before = served.process.memory_info().rss
            ends = fuzz_server(served, model, options.calls, options.seed)
            grown = served.process.memory_info().rss - before
    print(f"{options.calls} calls: {dict(ends)}, server grew {grown / 2**20:.1f} MiB")
    if grown > MOST_GROWTH_BYTES:
        raise RuntimeError(f"expected at most {MOST_GROWTH_BYTES} bytes")
    print(f"no finding in {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
