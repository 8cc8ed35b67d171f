"""Triton's Python backend: the file model.py of its model folder."""

import os
import sys

sys.path.insert(0, os.environ["QRNN_PEERS"])

import triton_python_backend_utils as backend  # pyright: ignore[reportMissingImports]
from scoring import Model


class TritonPythonModel:
    """Gets the requests of a batch one by one, of any lengths."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load once."""
        self._model = Model()

    def execute(self, requests: list) -> list:
        """One response for each request."""
        inputs = [backend.get_input_tensor_by_name(r, "input").as_numpy() for r in requests]
        outputs = self._model.score(inputs)
        return [
            backend.InferenceResponse(output_tensors=[backend.Tensor("output", output)])
            for output in outputs
        ]
