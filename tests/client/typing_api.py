"""How the client's types look to a user's type checker. Checked by pyright, never run."""

# pyright: strict

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

from qrnn_client import (
    TLS,
    AsyncClient,
    Batching,
    Client,
    Health,
    ModelInfo,
    PackedRows,
    Prediction,
    PredictionError,
    RetryPolicy,
    RowError,
    UnavailableError,
)
from qrnn_client.testing import FakeModel, FakeServer, Hold

Array = npt.NDArray[Any]

features: list[npt.NDArray[np.float32]] = [np.zeros((7, 12), np.float32)]
ids: list[npt.NDArray[np.int64]] = [np.arange(5)]


def blocking() -> None:
    """The blocking client."""
    policy = RetryPolicy(max_attempts=3, total_s=10)
    with Client(
        "localhost:8001",
        timeout_s=30,
        retry=policy,
        batching=Batching(in_flight=8),
        wait_for_ready=True,
        tls=TLS(root_certificates="ca.pem"),
    ) as client:
        assert_type(client, Client)
        prediction = client.predict("vowels", features)
        assert_type(prediction, Prediction)
        assert_type(prediction.outputs, list[Array | None])
        assert_type(prediction.errors, list[RowError])
        assert_type(prediction.states, list[Array | None] | None)
        assert_type(prediction.errors[0].timestep, int | None)
        assert_type(prediction.timing.total_s, float)
        assert_type(client.models(), list[ModelInfo])
        assert_type(client.health("vowels"), Health)

        client.predict("words", ids, states=prediction.states, return_state=True, timeout_s=5)
        client.predict("words", [[1, 2, 3], [4]])
        client.predict("vowels", [[[0.5, 1.0]]], states=np.zeros((1, 4)))
        client.predict("vowels", np.zeros((4, 7, 12)), on_error="return")
        client.predict("vowels", PackedRows(np.zeros((3, 12)), [1, 2]), version="2")
        client.predict("vowels", features, on_error="ignore")  # pyright: ignore[reportArgumentType] - no such choice

        report = client.score("vowels", "in.parquet", Path("out.parquet"), progress=print)
        assert_type(report.rows, int)
        assert_type(report.model, ModelInfo)


async def concurrent() -> None:
    """The asyncio client."""
    async with AsyncClient("localhost:8001") as client:
        assert_type(client, AsyncClient)
        assert_type(await client.predict("vowels", features), Prediction)
        assert_type(await client.models(), list[ModelInfo])
        assert_type(await client.health(), Health)
        assert_type((await client.score("vowels", "a.arrow", "b.arrow")).failed, int)


def errors() -> None:
    """What can be caught, and what is in it."""
    client = Client("localhost:8001")
    try:
        client.predict("vowels", features)
    except PredictionError as error:
        assert_type(error.prediction, Prediction)
    except UnavailableError as error:
        assert_type(error.call.attempts, int)
        connection: ConnectionError = error
        raise connection from None


def fake() -> None:
    """The fake server."""

    def score(row: Array) -> list[float]:
        return [float(row.sum())]

    with FakeServer(FakeModel(score=score, input_size=12)) as server:
        assert_type(server.target, str)
        assert_type(server.hold_next(), Hold)
