"""LitServe: JSON with the number of sequences and their float32 values in base64."""

import argparse
import base64
from typing import Any

import litserve  # pyright: ignore[reportMissingImports]
import numpy as np
from scoring import MAX_ROWS, WIDTH, Model


class Scorer(litserve.LitAPI):
    """Its documented way to send bytes is text in JSON."""

    def setup(self, device: str) -> None:
        """In the worker."""
        self._model = Model()

    def decode_request(self, request: dict[str, Any]) -> np.ndarray:
        """[B, T, WIDTH]."""
        values = np.frombuffer(base64.b64decode(request["values"]), np.float32)
        return values.reshape(request["rows"], -1, WIDTH)

    def batch(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Lengths differ: the model takes them as they are."""
        return inputs

    def predict(self, x: list[np.ndarray]) -> list[np.ndarray]:
        """One result for each request of the batch."""
        return self._model.score(x)

    def unbatch(self, output: list[np.ndarray]) -> list[np.ndarray]:
        """They are apart already."""
        return output

    def encode_response(self, output: np.ndarray) -> dict[str, str]:
        """Float32 scores in base64."""
        return {"scores": base64.b64encode(output.tobytes()).decode()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    api = Scorer(max_batch_size=MAX_ROWS, batch_timeout=0.002)
    server = litserve.LitServer(api, accelerator="cpu", timeout=False, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=parser.parse_args().port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
