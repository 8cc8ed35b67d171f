"""Requests that are wrong as a whole, at a real server: a clear error each, neighbours unharmed."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1 import prediction_pb2_grpc
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from support.artefacts import CONFIGS, random_rows, scores_by_hand, shared_artefacts
from support.server_process import server_process
from support.servers import array, request, tensor

ROWS = random_rows(CONFIGS["features"], [3, 2])


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    return shared_artefacts(tmp_path_factory, "features")


@pytest.fixture(scope="module")
def server(artefacts, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = ("--queue-timesteps", 1000)
    with server_process(artefacts.paths["native"], log, *options) as running:
        yield running


def changed(**fields):
    message = request(ROWS)
    for name, value in fields.items():
        getattr(message, name).CopyFrom(value)
    return message


def claiming(*shape):
    """A tensor that says it is larger than its bytes, or than any memory."""
    return pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=shape, data=bytes(20))


NO_ROWS = pb.PredictRequest(
    values=tensor(np.zeros((0, 5), np.float32)), lengths=tensor(np.zeros(0, np.int64))
)
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("message", "code", "texts"),
    [
        pytest.param(NO_ROWS, INVALID, ["at least one row", "got none"], id="no rows"),
        pytest.param(
            changed(values=claiming(2**40, 5)), INVALID, ["bytes", "20"], id="more than any memory"
        ),
        pytest.param(
            changed(values=claiming(2**62, 5)), INVALID, ["bytes", "20"], id="overflows 64 bits"
        ),
        pytest.param(
            changed(lengths=tensor(np.array([2**62] * 4))), INVALID, ["lengths"], id="sum overflows"
        ),
        pytest.param(
            request(random_rows(CONFIGS["features"], [600, 600])),
            EXHAUSTED,
            ["1200 timesteps", "at most 1000"],
            id="each row fits, together they do not",
        ),
        pytest.param(
            changed(state=tensor(np.zeros((2, 3), np.float32))),
            INVALID,
            ["state", "[2, ", "got float32 [2, 3]"],
            id="state of another width",
        ),
        pytest.param(
            request(ROWS, output_dtype=pb.DATA_TYPE_INT64),
            INVALID,
            ["output_dtype", "float32", "int64"],
            id="outputs of another type",
        ),
        pytest.param(
            request(ROWS, output_dtype=99), INVALID, ["output_dtype", "99"], id="unknown outputs"
        ),
    ],
)
def test_wrong_request_is_told_why_and_harms_nobody(artefacts, server, message, code, texts):
    """The code says whose fault it is, the text what was expected and what came."""
    with grpc.insecure_channel(server.target) as channel:
        predict = prediction_pb2_grpc.PredictionServiceStub(channel).Predict
        neighbour = predict.future(request(ROWS), timeout=60)
        with pytest.raises(grpc.RpcError) as refused:
            predict(message, timeout=60)
        outputs = [array(reply.output) for reply in (neighbour.result(), predict(request(ROWS)))]

    assert refused.value.code() == code
    for text in texts:
        assert text in refused.value.details()
    for output in outputs:
        expected = scores_by_hand(artefacts.model, ROWS)
        np.testing.assert_allclose(output, expected, rtol=0, atol=FLOAT32_MAX_ABS)
