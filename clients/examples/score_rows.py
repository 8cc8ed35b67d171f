"""Scores rows that are already in memory, and copes with one that is wrong.

python score_rows.py HOST:PORT
"""

# ruff: noqa: T201 - an example prints what it did

import sys

import numpy as np

from qrnn_client import Client

random = np.random.default_rng(0)

with Client(sys.argv[1]) as client:
    (model, *_) = client.models()
    lengths = (7, 29, 1, 12)
    rows = [random.standard_normal((t, model.input_size)).astype(np.float32) for t in lengths]
    rows.append(np.zeros((3, model.input_size + 1), np.float32))

    prediction = client.predict(model.name, rows, on_error="return")

print(f"{model.name} version {prediction.version} on {', '.join(prediction.devices)}")
for length, output in zip(lengths, prediction.outputs, strict=False):
    print(f"  {length:2} timesteps: {prediction.output_name} {output}")
for error in prediction.errors:
    print(f"  {error}")
