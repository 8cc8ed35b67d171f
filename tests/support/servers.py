"""A whole server in the test's own event loop, on a real socket, around a scorer of the test."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1 import prediction_pb2_grpc
from qrnn_protos.v1.limits import MAX_MESSAGE_BYTES
from qrnn_serve.server.app import Server
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.lifecycle import ModelSource

CLIENT_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
_DATA_TYPES = {
    "float16": pb.DATA_TYPE_FLOAT16,
    "float32": pb.DATA_TYPE_FLOAT32,
    "float64": pb.DATA_TYPE_FLOAT64,
    "int32": pb.DATA_TYPE_INT32,
    "int64": pb.DATA_TYPE_INT64,
}
_DTYPES = {data_type: np.dtype(name) for name, data_type in _DATA_TYPES.items()}


@dataclass
class Running:
    server: Server
    target: str
    channel: grpc.aio.Channel
    stub: prediction_pb2_grpc.PredictionServiceStub

    async def health(self, service: str) -> str:
        """The status of a service, as the health service says it now."""
        check = health_pb2_grpc.HealthStub(self.channel).Check
        reply = await check(health_pb2.HealthCheckRequest(service=service))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def source_of(load, name="sums", version="7"):
    """A model of one replica."""
    return ModelSource(name=name, version=version, loaders=lambda: [load])


@contextlib.asynccontextmanager
async def running_server(scorer, **settings):
    """Serve `scorer` as model "sums"; yields a Running with a connected stub."""
    config = ServerConfig(**{"port": 0, "restart_wait_s": 0.01} | settings)
    server = Server(config, source_of(lambda: scorer))
    try:
        await server.start()
        target = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
            stub = prediction_pb2_grpc.PredictionServiceStub(channel)
            yield Running(server, target, channel, stub)
    finally:
        if hasattr(scorer, "gate"):
            scorer.gate.set()
        await server.stop(grace_s=5)


def tensor(array) -> pb.Tensor:
    """An array as it goes on the wire."""
    array = np.ascontiguousarray(array)
    dtype = _DATA_TYPES[array.dtype.name]
    return pb.Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())


def array(tensor_: pb.Tensor) -> np.ndarray:
    """An array as it comes from the wire."""
    return np.frombuffer(tensor_.data, _DTYPES[tensor_.dtype]).reshape(tuple(tensor_.shape))


def request(rows, state=None, **fields) -> pb.PredictRequest:
    """A PredictRequest for a list of arrays, one a row."""
    lengths = np.array([len(row) for row in rows], np.int64)
    message = pb.PredictRequest(
        values=tensor(np.concatenate(rows)), lengths=tensor(lengths), **fields
    )
    if state is not None:
        message.state.CopyFrom(tensor(state))
    return message
