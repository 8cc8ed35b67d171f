"""What is done to the server of the soak while it is called."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import psutil

from fuzzing import SCHEMAS, Fuzzer
from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1 import prediction_pb2_grpc
from served import Served

PREDICT = "/qrnn_serve.v1.PredictionService/Predict"
MALFORMED_CODES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
SHORT_OF_MEMORY_S = 2.0
RECOVERY_S = 120.0
# A caller that sends a stream of messages and reads no reply, until it is killed.
_VANISHES = """
import sys, threading, grpc
message = sys.stdin.buffer.read()
def messages():
    for number in range(1000):
        if number == 20:
            print("sent", flush=True)
        yield message
with grpc.insecure_channel(sys.argv[1]) as channel:
    stream = channel.stream_stream("/qrnn_serve.v1.PredictionService/PredictStream")(messages())
    next(stream)
    threading.Event().wait()
"""


class Harm:
    """One kind of harm after the other, in random order, and what each took to be mended.

    Attributes:
        done: How often each was done.
        recovery_s: Seconds until all replicas served again, of each kill and each stop.
        malformed: Status of the malformed messages.
    """

    def __init__(self, served: Served, message: bytes, replicas: int, seed: int) -> None:
        """`message` is a good request, of callers that leave before its answer."""
        self.done: Counter[str] = Counter()
        self.recovery_s: list[float] = []
        self.malformed: Counter[str] = Counter()
        self._served = served
        self._message = message
        self._replicas = replicas
        self._random = np.random.default_rng(seed)
        self._fuzzer = Fuzzer(seed)
        self._version = 1
        self._channel = grpc.insecure_channel(served.target)
        self._kinds: dict[str, Callable[[], None]] = {
            "replica killed": self._kill,
            "replica stopped": self._hang,
            "replica out of memory": self._starve,
            "model reloaded": self._reload,
            "50 calls cancelled": self._cancel,
            "caller killed": self._vanish,
            "200 malformed messages": self._malform,
        }

    @property
    def rounds(self) -> int:
        """How often each kind was done at least."""
        return min(self.done[kind] for kind in self._kinds)

    def close(self) -> None:
        """Close its connection."""
        self._channel.close()

    def do_one(self) -> None:
        """Do the next harm and wait until it is mended.

        Raises:
            RuntimeError: It was not, in two minutes.
        """
        rarest = [kind for kind in self._kinds if self.done[kind] == self.rounds]
        kind = rarest[int(self._random.integers(len(rarest)))]
        self._kinds[kind]()
        self.done[kind] += 1

    def wait_for_replicas(self) -> float:
        """Wait until all replicas serve; how long that took."""
        started_s = time.monotonic()
        while self._served.metrics()["qrnn_replicas_alive"] < self._replicas:
            if time.monotonic() > started_s + RECOVERY_S:
                raise RuntimeError(f"no {self._replicas} replicas within {RECOVERY_S} s")
            time.sleep(0.1)
        return time.monotonic() - started_s

    def _replica(self) -> psutil.Process:
        replicas = self._served.replicas()
        return replicas[int(self._random.integers(len(replicas)))]

    def _kill(self) -> None:
        self._replace(signal.SIGKILL)

    def _hang(self) -> None:
        self._replace(signal.SIGSTOP)

    def _replace(self, number: signal.Signals) -> None:
        """Harm a replica so that only another process in its place helps."""
        started_s = time.monotonic()
        replica = self._replica()
        replica.send_signal(number)
        while replica.is_running() and replica.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > started_s + RECOVERY_S:
                raise RuntimeError(f"{replica} still runs after {number.name}")
            time.sleep(0.05)
        self.wait_for_replicas()
        self.recovery_s.append(time.monotonic() - started_s)

    def _starve(self) -> None:
        """A replica gets no more memory for a while."""
        replica = self._replica()
        with contextlib.suppress(psutil.NoSuchProcess):
            before = replica.rlimit(resource.RLIMIT_AS)
            replica.rlimit(resource.RLIMIT_AS, (replica.memory_info().vms, before[1]))
            time.sleep(SHORT_OF_MEMORY_S)
            replica.rlimit(resource.RLIMIT_AS, before)
        self.wait_for_replicas()

    def _reload(self) -> None:
        self._version = 3 - self._version
        stub = prediction_pb2_grpc.PredictionServiceStub(self._channel)
        asked = pb.LoadModelRequest(model="soak", version=str(self._version))
        stub.LoadModel(asked, timeout=RECOVERY_S)

    def _cancel(self) -> None:
        """Callers leave at any moment between sending and the answer."""
        predict = self._channel.unary_unary(PREDICT)
        for _ in range(50):
            call = predict.future(self._message, timeout=60)
            time.sleep(float(self._random.uniform(0, 0.02)))
            call.cancel()

    def _vanish(self) -> None:
        """A process with many calls under way is killed."""
        command = [sys.executable, "-c", _VANISHES, self._served.target]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as caller:
            assert caller.stdin is not None  # noqa: S101
            assert caller.stdout is not None  # noqa: S101
            caller.stdin.write(self._message)
            caller.stdin.close()
            caller.stdout.readline()
            caller.kill()

    def _malform(self) -> None:
        """Damaged messages, eight at a time."""
        predict = self._channel.unary_unary(PREDICT)

        def code_of(message: bytes) -> str:
            try:
                predict(message, timeout=60)
            except grpc.RpcError as error:
                return error.code().name  # pyright: ignore[reportAttributeAccessIssue]
            return "OK"

        messages = [self._fuzzer.message(SCHEMAS[0]) for _ in range(200)]
        with ThreadPoolExecutor(8) as callers:
            self.malformed.update(callers.map(code_of, messages))
        unknown = set(self.malformed) - MALFORMED_CODES
        if unknown:
            raise RuntimeError(f"malformed messages ended with {unknown}")
