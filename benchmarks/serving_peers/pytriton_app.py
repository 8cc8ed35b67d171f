"""pytriton: its decorator joins requests of one shape; others go alone."""

import argparse

import numpy as np
from pytriton.decorators import batch  # pyright: ignore[reportMissingImports]
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor  # pyright: ignore[reportMissingImports]
from pytriton.triton import Triton, TritonConfig  # pyright: ignore[reportMissingImports]
from scoring import MAX_CALL_ROWS, WIDTH, Model

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    model = Model()

    @batch
    def infer(input: np.ndarray) -> list[np.ndarray]:
        """[B, T, WIDTH] to [B, C]."""
        return model.score([input])

    config = TritonConfig(
        allow_http=True,
        http_address="127.0.0.1",
        http_port=parser.parse_args().port + 1,
        grpc_address="127.0.0.1",
        grpc_port=parser.parse_args().port,
        allow_metrics=False,
        log_verbose=0,
    )
    # The current folder is the benchmark's; the default is one in the user's home.
    with Triton(config=config, workspace="workspace") as triton:
        triton.bind(
            model_name="model",
            infer_func=infer,
            inputs=[Tensor(name="input", dtype=np.float32, shape=(-1, WIDTH))],
            outputs=[Tensor(name="output", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(
                max_batch_size=MAX_CALL_ROWS, batcher=DynamicBatcher(max_queue_delay_microseconds=0)
            ),
        )
        triton.serve()
