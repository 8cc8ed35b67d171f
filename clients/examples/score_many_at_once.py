"""Scores many small requests at the same time from one event loop, as a web service would.

python score_many_at_once.py HOST:PORT
"""

# ruff: noqa: T201 - an example prints what it did

import asyncio
import sys

import numpy as np

from qrnn_client import AsyncClient


async def main(target: str) -> None:
    """Send a hundred predictions and print how long they took together."""
    random = np.random.default_rng(0)
    async with AsyncClient(target) as client:
        (model, *_) = await client.models()
        requests = [random.standard_normal((1, t, model.input_size)) for t in range(1, 101)]
        predictions = await asyncio.gather(
            *(client.predict(model.name, request) for request in requests)
        )

    slowest_s = max(prediction.timing.total_s for prediction in predictions)
    print(f"{model.name} version {model.version}: {len(predictions)} predictions")
    print(f"  the slowest took {1000 * slowest_s:.1f} ms, first scores {predictions[0].outputs[0]}")


asyncio.run(main(sys.argv[1]))
