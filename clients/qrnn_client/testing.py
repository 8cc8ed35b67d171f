"""A server for tests of programs that use qrnn_client: a real socket, real messages, any fault.

    with FakeServer(FakeModel(input_size=12, score=lambda row: row.mean(axis=0)[:1])) as server:
        with Client(server.target) as client:
            client.predict("model", [np.ones((7, 12), np.float32)])

Scores come from a function of one row, so a test knows them; faults are asked for beforehand and
hit the next calls of Predict in the order of their arrival.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import wrappers_pb2

from qrnn_client._channel import HEALTH_CHECK, LIST_MODELS, PREDICT
from qrnn_client._fake_model import FakeModel, array_of, fake_reply
from qrnn_client._models import Health
from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1.limits import KEEPALIVE_MIN_PING_INTERVAL_S, MAX_MESSAGE_BYTES

__all__ = ["FakeCall", "FakeModel", "FakeServer", "Hold"]

_MIN_PING_INTERVAL_MS = KEEPALIVE_MIN_PING_INTERVAL_S * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCall:
    """What a Predict that arrived asked for.

    Attributes:
        model: Name of the model.
        version: Version of it, or empty.
        lengths: Timesteps of each row.
        return_state: It asked for the rows' states.
        request_id: Its id.
        request_bytes: Its size.
        timeout_s: How long the client would wait for the answer.
    """

    model: str
    version: str
    lengths: tuple[int, ...]
    return_state: bool
    request_id: str
    request_bytes: int
    timeout_s: float


@dataclass(slots=True)
class Hold:
    """A call that waits for its answer.

    Attributes:
        arrived: Set when the server has the call.
        gone: Set when the client no longer waits for it.
    """

    arrived: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let the call be answered."""
        self._released.set()

    def abandon(self) -> None:
        """Note that nobody waits for the answer."""
        self.gone.set()
        self._released.set()

    def wait(self, context: grpc.ServicerContext) -> None:
        """Wait until the call is released, or nobody waits for it any more."""
        self.arrived.set()
        if context.add_callback(self.abandon):
            self._released.wait()
        else:
            self.abandon()


@dataclass(frozen=True, slots=True)
class _Fault:
    before: Callable[[grpc.ServicerContext], None] | None = None
    after: Callable[[pb.PredictResponse], None] | None = None


class FakeServer:
    """Serves fake models on 127.0.0.1 until it is stopped; use it as a context manager.

    Args:
        models: The models. May be changed while it runs: `server.models = [...]`.
        port: Port to listen on; 0 picks a free one, which a restart keeps.
        max_message_bytes: Largest message that it takes and sends.
        max_request_timesteps: Most timesteps of one request; 0 for no limit.
        credentials: TLS; None for no encryption.
        options: Further gRPC channel arguments.

    Attributes:
        models: What it serves.
        calls: Each Predict that arrived, in order.
        health: Its answer to a health check, by model name or "" for the server; SERVING if absent.
        limits: What it says of its limits.
        port: Where it listens.
    """

    def __init__(
        self,
        *models: FakeModel,
        port: int = 0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_request_timesteps: int = 0,
        credentials: grpc.ServerCredentials | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self.models: Sequence[FakeModel] = models
        self.health: dict[str, Health] = {}
        self.port = port
        self.calls: list[FakeCall] = []
        self.limits = pb.ListModelsResponse(
            max_message_bytes=max_message_bytes, max_request_timesteps=max_request_timesteps
        )
        self._credentials = credentials
        self._options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            *options,
        )
        self._answered = 0
        self._changed = threading.Condition()
        self._faults: collections.deque[_Fault] = collections.deque()
        self._server: grpc.Server | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def target(self) -> str:
        """HOST:PORT for a client."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Listen; after a stop, on the same port again."""
        # Held calls keep a thread each, so there are plenty.
        self._server = grpc.server(ThreadPoolExecutor(64, "fake-server"), options=self._options)
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        address = f"127.0.0.1:{self.port}"
        if self._credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self._credentials)
        self._server.start()
        return self

    def stop(self) -> None:
        """Stop listening and cut off the calls under way."""
        if self._server is not None:
            self._server.stop(grace=None).wait()
            self._server = None

    def fail_next(
        self,
        code: grpc.StatusCode,
        message: str = "asked for by the test",
        *,
        retry_after_s: float | None = None,
        times: int = 1,
    ) -> None:
        """Answer the next calls with a status, and with a hint when to come back."""

        def fail(context: grpc.ServicerContext) -> None:
            if retry_after_s is not None:
                hint = str(round(retry_after_s * 1000))
                context.set_trailing_metadata((("grpc-retry-pushback-ms", hint),))
            context.abort(code, message)

        self._add(_Fault(before=fail), times)

    def hold_next(self) -> Hold:
        """Let the next call wait until its Hold is released."""
        hold = Hold()
        self._add(_Fault(before=hold.wait), 1)
        return hold

    def drop_next(self, times: int = 1) -> None:
        """Never answer the next calls."""
        self._add(_Fault(before=lambda context: Hold().wait(context)), times)

    def pass_next(self, times: int = 1) -> None:
        """Answer the next calls as usual; faults asked for later hit the calls after them."""
        self._add(_Fault(), times)

    def tamper_next(self, change: Callable[[pb.PredictResponse], None], times: int = 1) -> None:
        """Change the replies to the next calls before they are sent."""
        self._add(_Fault(after=change), times)

    def wait_for_answers(self, count: int, timeout_s: float = 60.0) -> bool:
        """Wait until `count` calls of Predict were answered since the server was made."""
        with self._changed:
            return self._changed.wait_for(lambda: self._answered >= count, timeout_s)

    def answer(self, request: pb.PredictRequest, context: grpc.ServicerContext) -> Any:
        """Answer one Predict."""
        with self._changed:
            self.calls.append(_call_of(request, context))
            fault = self._faults.popleft() if self._faults else _Fault()
        if fault.before:
            fault.before(context)
        model = self._find(request)
        if model is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model!r}")
        response = fake_reply(model, request)
        if fault.after:
            fault.after(response)
        with self._changed:
            self._answered += 1
            self._changed.notify_all()
        return response

    def _add(self, fault: _Fault, times: int) -> None:
        with self._changed:
            self._faults.extend(itertools.repeat(fault, times))

    def _find(self, request: pb.PredictRequest) -> FakeModel | None:
        for model in self.models:
            if request.model == model.name and request.version in ("", model.version):
                return model
        return None


class _Handlers(grpc.GenericRpcHandler):
    """The methods of the fake server, by their path."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            PREDICT: grpc.unary_unary_rpc_method_handler(
                server.answer,
                request_deserializer=pb.PredictRequest.FromString,
                response_serializer=pb.PredictResponse.SerializeToString,
            ),
            LIST_MODELS: grpc.unary_unary_rpc_method_handler(
                self._list_models,
                request_deserializer=pb.ListModelsRequest.FromString,
                response_serializer=pb.ListModelsResponse.SerializeToString,
            ),
            HEALTH_CHECK: grpc.unary_unary_rpc_method_handler(self._check),
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._methods.get(handler_call_details.method)

    def _list_models(
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        limits = self._server.limits
        return pb.ListModelsResponse(
            models=[model.info() for model in self._server.models],
            max_message_bytes=limits.max_message_bytes,
            max_request_timesteps=limits.max_request_timesteps,
        )

    def _check(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        name = wrappers_pb2.StringValue.FromString(request).value
        known = {"", *(model.name for model in self._server.models)}
        if name not in known:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {name!r}")
        status = list(Health).index(self._server.health.get(name, Health.SERVING))
        return wrappers_pb2.UInt32Value(value=status).SerializeToString()


def _call_of(request: pb.PredictRequest, context: grpc.ServicerContext) -> FakeCall:
    return FakeCall(
        model=request.model,
        version=request.version,
        lengths=tuple(array_of(request.lengths).tolist()),
        return_state=request.return_state,
        request_id=request.request_id,
        request_bytes=request.ByteSize(),
        timeout_s=context.time_remaining(),
    )
