"""What the server adds to the engine: reading requests, writing replies, and gRPC between.

    python benchmarks/frontend.py [--seconds 3]

In process: the codec of server and client beside protobuf's own parsing and writing of the same
messages, in turns. Over a socket: a server process of a small model, one call at a time, beside the
engine on the same rows in this process, a health check of the same server, and servers that do no
more than send a message back, in grpc.aio and in grpc's threads: the floors. Then many small calls
at once to a model that does next to nothing, with one front end and with several: what each process
pays a call in processor time, which says more than the rate where the client needs cores too. And
messages of up to 60 MiB each way. Numbers of both sides are compared first. Prints tables and
writes benchmarks/results/frontend.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from cpu import Turns
from qrnn_client import PackedRows as ClientRows
from qrnn_client._checks import check_rows
from qrnn_client._codec import Call as ClientCall
from qrnn_client._codec import Reply, decode_reply, parse_reply
from qrnn_client._models import read_catalogue
from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.limits import MAX_MESSAGE_BYTES
from qrnn_serve.core.malloc import keep_freed_memory
from qrnn_serve.engine.replica_status import ReplicaState, ReplicaStatus
from qrnn_serve.engine.request import BatchTiming, ScoredRequest
from qrnn_serve.engine.types import ModelSchema, PackedRows, ScoredRows, Scorer
from qrnn_serve.server import codec

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/frontend.json"
PREDICT = "/qrnn_serve.v1.PredictionService/Predict"
WIDTH = 64
# Rows and timesteps a row; the last is near the largest message.
SHAPES = {"1 row": (1, 32), "1,000 rows": (1000, 32), "60 MiB": (7680, 32)}
SCHEMA = ModelSchema(
    takes_ids=False,
    input_size=WIDTH,
    vocabulary_size=0,
    dtype="float32",
    output_name="output",
    output_size=WIDTH,
    output_per_timestep=True,
    state_size=4,
    weights_sha256="0" * 64,
)
IDENTITY = codec.ModelIdentity(name="model", version="1", schema=SCHEMA)
TIMING = BatchTiming(
    queue_s=0.0, upload_s=0.0, compute_s=0.0, download_s=0.0, batch_rows=1, batch_timesteps=1
)
ECHO = "/echo/Echo"
FRONT_ENDS = (1, 2)
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

Row = dict[str, Any]
Call = Callable[[bytes], bytes]


class Echo:
    """A scorer whose scores are its input: what is left of a call is the front end."""

    schema = SCHEMA
    device, engine, alive = "cpu", "native", True
    max_timesteps = 1 << 24
    stages = ()

    def interrupt(self) -> bool:
        """Not a process."""
        return False

    def score(self, rows: PackedRows) -> ScoredRows:
        """The features as they came."""
        return ScoredRows(output=rows.values, state=np.zeros((rows.rows, 4), np.float32))

    def close(self) -> None:
        """Nothing to give back."""


def message_of(values: np.ndarray, rows: int, **fields: Any) -> bytes:
    """A PredictRequest of rows of equal length."""
    dtype = {"float32": pb.DATA_TYPE_FLOAT32, "float16": pb.DATA_TYPE_FLOAT16}[values.dtype.name]
    lengths = np.full(rows, len(values) // rows)
    return pb.PredictRequest(
        model="model",
        values=pb.Tensor(dtype=dtype, shape=values.shape, data=values.tobytes()),
        lengths=pb.Tensor(dtype=pb.DATA_TYPE_INT64, shape=lengths.shape, data=lengths.tobytes()),
        **fields,
    ).SerializeToString()


def protobuf_decode(message: bytes) -> np.ndarray:
    """The request as protobuf reads it, with the checks of numbers that any server needs."""
    request = pb.PredictRequest.FromString(message)
    lengths = np.frombuffer(request.lengths.data, np.int64)
    values = np.frombuffer(request.values.data, np.float32).reshape(request.values.shape)
    if lengths.sum() != len(values) or not np.isfinite(values).all():
        raise ValueError("wrong rows")
    return values


def protobuf_encode(output: np.ndarray, rows: int) -> bytes:
    """A reply as protobuf writes it."""
    response = pb.PredictResponse(model="model", version="1", device="cpu", engine="native")
    lengths = np.full(rows, len(output) // rows)
    for tensor, array in (
        (response.rows, np.arange(rows)),
        (response.output, output),
        (response.output_lengths, lengths),
    ):
        tensor.dtype = pb.DATA_TYPE_FLOAT32 if array is output else pb.DATA_TYPE_INT64
        tensor.shape.extend(array.shape)
        tensor.data = array.tobytes()
    response.timing.batch_rows = response.timing.batch_timesteps = 1
    return response.SerializeToString()


def same_bytes(data: bytes, array: np.ndarray) -> None:
    """Check that a tensor's data are those of an array."""
    if data != array.tobytes():
        raise ValueError("the reply holds other numbers than were scored")


def codec_row(name: str, rows: int, timesteps: int, seconds: float) -> Row:
    """Reading a request and writing a reply with as many numbers."""
    values = np.random.default_rng(0).standard_normal((rows * timesteps, WIDTH), np.float32)
    message = message_of(values, rows)
    decoded = codec.decode(codec.parse(message), SCHEMA, 1 << 24)
    answer = ScoredRequest(
        rows=np.arange(rows),
        scored=ScoredRows(output=values, state=np.zeros((rows, 4), np.float32)),
        failures=(),
        timing=TIMING,
        device="cpu",
        engine="native",
    )
    read = None if decoded.rows is None else decoded.rows.values
    np.testing.assert_array_equal(read, protobuf_decode(message))
    written = pb.PredictResponse.FromString(codec.encode(decoded, answer, IDENTITY))
    same_bytes(written.output.data, values)
    reply = codec.encode(decoded, answer, IDENTITY)
    call = client_call(values, rows)
    np.testing.assert_array_equal(decode_reply(parse_reply(reply), call).output, values)
    turns = Turns(
        {
            "decode": lambda: codec.decode(codec.parse(message), SCHEMA, 1 << 24),
            "protobuf decode": lambda: protobuf_decode(message),
            "encode": lambda: codec.encode(decoded, answer, IDENTITY),
            "protobuf encode": lambda: protobuf_encode(values, rows),
            "client read": lambda: decode_reply(parse_reply(reply), call),
            "client protobuf read": lambda: decode_reply(protobuf_reply(reply), call),
            "copy": values.copy,
        },
        seconds,
    )
    return {
        "message": name,
        "bytes": len(message),
        **{f"{side} us": turns.median(side) * 1e6 for side in turns.times},
        "decode: protobuf / ours": turns.ratio("protobuf decode", "decode"),
        "encode: protobuf / ours": turns.ratio("protobuf encode", "encode"),
        "client: protobuf / ours": turns.ratio("client protobuf read", "client read"),
    }


def protobuf_reply(message: bytes) -> Reply:
    """A reply as protobuf reads it."""
    return Reply(fields=pb.PredictResponse.FromString(message), data={})


def client_call(values: np.ndarray, rows: int) -> ClientCall:
    """What the client knows of the call that was answered."""
    replica = ReplicaStatus(device="cpu", state=ReplicaState.SERVING, restarts=0, last_error="")
    info = codec.model_info(IDENTITY, "native", (replica,))
    [model] = read_catalogue(pb.ListModelsResponse(models=[info])).models
    packed = check_rows(ClientRows(values, np.full(rows, len(values) // rows)), model)
    part = slice(0, rows)
    return ClientCall(
        info=model, version="", rows=packed, part=part, return_state=False, request_id=""
    )


def latency_row(loop: str, seconds: float) -> Row:
    """One call at a time of one row (T 32, two layers of 256), beside the engine alone."""
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder))
        values = np.random.default_rng(0).standard_normal((32, WIDTH), np.float32)
        packed = PackedRows(values=values, lengths=np.array([32]))
        scorer = load(model)
        with (
            serving(model, loop) as (call, check),
            echoing(loop) as echo,
            process_of(echo_in_threads) as threads,
        ):
            echo_in_thread = threads.unary_unary(ECHO)
            message = message_of(values, 1)
            reply = pb.PredictResponse.FromString(call(message))
            expected = np.asarray(scorer.score(packed).output, np.float32)
            served = np.frombuffer(reply.output.data, np.float32).reshape(expected.shape)
            np.testing.assert_allclose(served, expected, rtol=0, atol=1e-6)
            turns = Turns(
                {
                    "engine": lambda: scorer.score(packed),
                    "call": lambda: call(message),
                    "health check": lambda: check(b""),
                    "aio echo": lambda: echo(message),
                    "threads echo": lambda: echo_in_thread(message),
                },
                seconds,
            )
            timings = [pb.PredictResponse.FromString(call(message)).timing for _ in range(200)]
    added = [c - e for c, e in zip(turns.times["call"], turns.times["engine"], strict=True)]
    beyond = [a - e for a, e in zip(added, turns.times["aio echo"], strict=True)]
    parts = ("decode_s", "queue_s", "upload_s", "compute_s", "download_s", "encode_s")
    return {
        "loop": loop,
        "engine p50 ms": turns.median("engine") * 1e3,
        "health check p50 ms": turns.median("health check") * 1e3,
        "aio echo p50 ms": turns.median("aio echo") * 1e3,
        "threads echo p50 ms": turns.median("threads echo") * 1e3,
        "call p50 ms": turns.median("call") * 1e3,
        "added p50 ms": statistics.median(added) * 1e3,
        "added beyond aio echo p50 ms": statistics.median(beyond) * 1e3,
        "added p10 ms": statistics.quantiles(added, n=10)[0] * 1e3,
        "added p90 ms": statistics.quantiles(added, n=10)[-1] * 1e3,
        **{
            f"{part.removesuffix('_s')} us": statistics.median(
                getattr(timing, part) for timing in timings
            )
            * 1e6
            for part in parts
        },
    }


def front_ends_row(loop: str, front_ends: int, seconds: float) -> Row:
    """Small calls, 32 at once over 8 connections, and the processor time of each process a call."""
    values = np.random.default_rng(0).standard_normal((32, WIDTH), np.float32)
    message = message_of(values, 1)
    with started(serve_for_ever, None, loop, front_ends) as (target, pid):
        server = psutil.Process(pid)
        children = [p for p in server.children() if "front_end" in " ".join(p.cmdline())]
        before = [processor_s(p) for p in (server, *children)]
        calls = asyncio.run(call_for(seconds, target, message))
        each = [
            (processor_s(p) - b) / calls * 1e6
            for p, b in zip((server, *children), before, strict=True)
        ]
    return {
        "loop": loop,
        "front ends": front_ends,
        "calls/s": calls / seconds,
        "server CPU us a call": each[0],
        "front ends CPU us a call": sum(each[1:]),
        # With cores to spare, the busiest process is full first.
        "most calls/s by CPU": 1e6 / max(each),
    }


async def call_for(seconds: float, target: str, message: bytes) -> int:
    """How many calls were answered."""
    options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    channels = [grpc.aio.insecure_channel(target, options=options) for _ in range(8)]
    answered = 0
    stop = time.perf_counter() + seconds

    async def call_again_and_again(channel: grpc.aio.Channel) -> None:
        nonlocal answered
        call = channel.unary_unary(PREDICT)
        while time.perf_counter() < stop:
            await call(message)
            answered += 1

    await asyncio.gather(*(call_again_and_again(c) for c in channels for _ in range(4)))
    await asyncio.gather(*(channel.close() for channel in channels))
    return answered


def processor_s(process: psutil.Process) -> float:
    """Seconds of processor time that a process has used."""
    times = process.cpu_times()
    return times.user + times.system


def throughput_row(loop: str, dtype: str, seconds: float) -> Row:
    """Messages of about 60 MiB of float32 there and back, one call at a time."""
    rows, timesteps = SHAPES["60 MiB"]
    values = np.random.default_rng(0).standard_normal((rows * timesteps, WIDTH), np.float32)
    sent = values.astype(dtype)
    asked = pb.DATA_TYPE_FLOAT16 if dtype == "float16" else pb.DATA_TYPE_UNSPECIFIED
    message = message_of(sent, rows, output_dtype=asked)
    with serving(None, loop) as (call, _), echoing(loop) as echo:
        reply = pb.PredictResponse.FromString(call(message))
        same_bytes(reply.output.data, sent)
        turns = Turns({"call": lambda: call(message), "echo": lambda: echo(message)}, seconds)
    call_s = turns.median("call")
    return {
        "loop": loop,
        "dtype": dtype,
        "MB each way": len(message) / 1e6,
        "call ms": call_s * 1e3,
        "gRPC echo ms": turns.median("echo") * 1e3,
        "call / echo": turns.ratio("call", "echo"),
        "MB/s, both ways": 2 * len(message) / call_s / 1e6,
        "numbers/s, there and back": values.size / call_s,
    }


def small_model(folder: Path) -> Path:
    """Two layers of 256, saved."""
    from qrnn_serve import SequenceModel, save
    from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig

    layers = (LayerConfig(hidden_size=256, window=2), LayerConfig(hidden_size=256))
    config = SequenceModelConfig(
        qrnn=QRNNConfig(input_size=WIDTH, layers=layers), pooling="mean", head_size=9
    )
    save(SequenceModel(config), folder / "model.pt")
    return folder / "model.pt"


def load(model: Path | None) -> Scorer:
    """The scorer of a model, on one thread; None is for Echo."""
    from qrnn_serve.scorers import load_scorer

    return Echo() if model is None else load_scorer(model, threads=1)


@contextmanager
def serving(model: Path | None, loop: str) -> Iterator[tuple[Call, Call]]:
    """A server process, and what calls its Predict and its health check."""
    with process_of(serve_for_ever, model, loop, 1) as channel:
        yield channel.unary_unary(PREDICT), channel.unary_unary(HEALTH_CHECK)


@contextmanager
def echoing(loop: str) -> Iterator[Call]:
    """A gRPC server that sends back what it gets: the floor of any server in Python."""
    with process_of(echo_for_ever, loop) as channel:
        yield channel.unary_unary(ECHO)


@contextmanager
def process_of(target: Callable[..., None], *args: Any) -> Iterator[grpc.Channel]:
    """A process that serves, and a channel to it."""
    with (
        started(target, *args) as (address, _),
        grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
    ):
        yield channel


@contextmanager
def started(target: Callable[..., None], *args: Any) -> Iterator[tuple[str, int]]:
    """A process that serves, its address and its id; `target` is given where to send the first."""
    context = multiprocessing.get_context("spawn")
    address, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs))
    process.start()
    try:
        yield address.recv(), process.pid or 0
    finally:
        process.terminate()
        process.join()


def echo_for_ever(loop: str, address: Any) -> None:
    """The process of `echoing`."""

    async def echo(message: bytes, _: Any) -> bytes:
        return message

    async def serve_echo() -> None:
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        method = grpc.unary_unary_rpc_method_handler(echo)
        handler = grpc.method_handlers_generic_handler("echo", {"Echo": method})
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        address.send(f"127.0.0.1:{port}")
        await server.wait_for_termination()

    runner(loop)(serve_echo())


def echo_in_threads(address: Any) -> None:
    """A server that sends back what it gets, of grpc's other kind."""
    server = grpc.server(futures.ThreadPoolExecutor(4), options=CHANNEL_OPTIONS)
    method = grpc.unary_unary_rpc_method_handler(lambda message, _: message)
    handler = grpc.method_handlers_generic_handler("echo", {"Echo": method})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    address.send(f"127.0.0.1:{port}")
    server.wait_for_termination()


def runner(loop: str) -> Any:
    """What runs a coroutine in asyncio or uvloop."""
    if loop == "uvloop":
        import uvloop  # pyright: ignore[reportMissingImports]

        return uvloop.run
    return asyncio.run


def serve_for_ever(model: Path | None, loop: str, front_ends: int, address: Any) -> None:
    """The server process; `loop` is asyncio or uvloop."""
    from qrnn_serve.server.app import serve
    from qrnn_serve.server.config import ServerConfig
    from qrnn_serve.server.lifecycle import ModelSource

    keep_freed_memory()
    # Not the command itself: it serves files, and Echo is none.
    config = ServerConfig(
        port=0,
        queue_timesteps=1 << 24,
        max_batch_timesteps=1 << 18,
        threads=1,
        front_ends=front_ends,
        event_loop="uvloop" if loop == "uvloop" else "asyncio",
    )
    source = ModelSource(name="model", version="1", loaders=lambda: [lambda: load(model)])
    runner(loop)(serve(config, source, address.send))


def table(title: str, rows: list[Row]) -> None:
    """Print rows of equal keys."""
    print(f"\n{title}")
    names = list(rows[0])
    print(" | ".join(names))
    for row in rows:
        values = (row[name] for name in names)
        print(" | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure the server's front end.")
    parser.add_argument("--seconds", type=float, default=3.0, help="a measurement")
    seconds: float = parser.parse_args().seconds
    keep_freed_memory()
    loops = ["asyncio", *(["uvloop"] if find_spec("uvloop") else [])]
    report = {
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "grpcio": metadata.version("grpcio"),
            "protobuf": metadata.version("protobuf"),
        },
        "codec": [codec_row(name, *shape, seconds) for name, shape in SHAPES.items()],
        "latency": [latency_row(loop, seconds) for loop in loops],
        "front ends": [
            front_ends_row(loop, count, seconds) for loop in loops for count in FRONT_ENDS
        ],
        "throughput": [
            throughput_row(loop, dtype, seconds)
            for loop in loops
            for dtype in ("float32", "float16")
        ],
    }
    for title in ("codec", "latency", "front ends", "throughput"):
        table(title, report[title])
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
