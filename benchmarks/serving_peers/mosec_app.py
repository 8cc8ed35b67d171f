"""mosec: a body of 8 bytes with the number of sequences, then their float32 values."""

import numpy as np
from mosec import Server, Worker  # pyright: ignore[reportMissingImports]
from scoring import MAX_ROWS, WIDTH, Model


class Scorer(Worker):
    """Bytes in, bytes out."""

    def __init__(self) -> None:
        super().__init__()
        self._model = Model()

    def deserialize(self, data: bytes) -> np.ndarray:
        """[B, T, WIDTH]."""
        rows = int.from_bytes(data[:8], "little")
        return np.frombuffer(data, np.float32, offset=8).reshape(rows, -1, WIDTH)

    def serialize(self, data: np.ndarray) -> bytes:
        """Float32 scores."""
        return data.tobytes()

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        """One result for each request of the batch."""
        return self._model.score(data)


if __name__ == "__main__":
    server = Server()
    # Milliseconds; 1 is the least that it takes.
    server.append_worker(Scorer, max_batch_size=MAX_ROWS, max_wait_time=1)
    server.run()
