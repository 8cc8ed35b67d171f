"""A fake server in a process of its own, to be killed: `fake_server_process.py PORT`.

Prints its port when it is ready. Scores a row [T, 3] as the conftest's model does.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

from qrnn_client.testing import FakeModel, FakeServer


def scores_of(row):
    values = np.asarray(row, np.float64)
    return np.array([values.sum() + 1000 * len(values), (values**2).sum()])


if __name__ == "__main__":
    model = FakeModel(score=scores_of, input_size=3, output_size=2, name="sums")
    with FakeServer(model, port=int(sys.argv[1])) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        threading.Event().wait()
