"""Train a language model whose layers lie on two devices, then score with it served over both.

The embedding and the lower layers are on the first device, the upper layers and the decoder on the
second; autograd carries the gradients back over the border. The trained layers become one model,
which `qrnn-serve --placement layers` puts on both devices again.

    python examples/model_parallel.py --device cuda            the first two GPUs
    python examples/model_parallel.py --device cpu

The text is a repeated pattern, so the next token can be learnt. Ends with status 1 when the loss
does not fall to half, or the served model gives other logits.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from qrnn_client import Client
from qrnn_serve import QRNN, SequenceModel, save
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig


class TwoDeviceLanguageModel(nn.Module):
    """Ids [T, B] to logits [T, B, V], with two QRNN layers on each of two devices."""

    def __init__(
        self, vocabulary_size: int, hidden_size: int, lower: torch.device, upper: torch.device
    ) -> None:
        super().__init__()
        self.lower_device, self.upper_device = lower, upper
        self.embedding = nn.Embedding(vocabulary_size, hidden_size).to(lower)
        self.lower = QRNN(hidden_size, hidden_size, num_layers=2, window=2).to(lower)
        self.upper = QRNN(hidden_size, hidden_size, num_layers=2).to(upper)
        self.decoder = nn.Linear(hidden_size, vocabulary_size).to(upper)

    def forward(self, ids: Tensor) -> Tensor:
        """Run the lower layers, hand their output over, run the upper ones."""
        lower_output, _ = self.lower(self.embedding(ids.to(self.lower_device)))
        upper_output, _ = self.upper(lower_output.to(self.upper_device))
        return self.decoder(upper_output)


def whole_model(trained: TwoDeviceLanguageModel) -> SequenceModel:
    """Return the trained layers as one model on the CPU."""
    vocabulary, hidden = trained.embedding.weight.shape
    lower, upper = LayerConfig(hidden_size=hidden, window=2), LayerConfig(hidden_size=hidden)
    config = SequenceModelConfig(
        qrnn=QRNNConfig(input_size=hidden, layers=(lower, lower, upper, upper)),
        vocabulary_size=vocabulary,
        head_size=vocabulary,
    )
    model = SequenceModel(config)
    model.embedding.load_state_dict(trained.embedding.state_dict())
    model.head.load_state_dict(trained.decoder.state_dict())
    for number, layer in enumerate([*trained.lower.layers, *trained.upper.layers]):
        model.qrnn.layers[number].load_state_dict(layer.state_dict())
    return model.eval()


@contextlib.contextmanager
def served(model: SequenceModel, devices: list[str]) -> Iterator[str]:
    """Serve the model with its layers over the devices; yield HOST:PORT."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        save(model, path)
        command = [str(Path(sys.executable).parent / "qrnn-serve"), str(path), "--port", "0"]
        placed = ["--device", ",".join(devices), "--placement", "layers", "--log-level", "warning"]
        process = subprocess.Popen([*command, *placed], stdout=subprocess.PIPE, text=True)
        try:
            line = process.stdout.readline() if process.stdout else ""
            if "listening on " not in line:
                sys.exit("qrnn-serve did not start; what it said is above")
            yield line.split("listening on ")[1].strip()
        finally:
            process.terminate()
            process.wait(timeout=60)


def score_served(model: SequenceModel, devices: list[str], ids: Tensor) -> tuple[float, float]:
    """Score ids [T, B] on a server; return milliseconds a call and the largest difference."""
    rows = list(ids.T.numpy())
    with torch.inference_mode():
        expected, _ = model(ids.T.contiguous())
    with served(model, devices) as target, Client(target) as client:
        client.predict("model", rows)
        started = time.perf_counter()
        prediction = client.predict("model", rows)
        call_ms = 1000 * (time.perf_counter() - started)
    got = torch.stack([torch.from_numpy(output.copy()) for output in prediction.outputs])
    return call_ms, float((got - expected).abs().max() / expected.abs().max().clamp(min=1))


def two_devices(kind: str) -> tuple[torch.device, torch.device]:
    """Return the devices of the lower and the upper half."""
    if kind == "cpu":
        return torch.device("cpu"), torch.device("cpu")
    if torch.cuda.device_count() < 2:
        sys.exit(
            f"two CUDA GPUs are needed, {torch.cuda.device_count()} found; "
            "--device cpu runs the same program on the CPU"
        )
    return torch.device("cuda", 0), torch.device("cuda", 1)


def pattern(timesteps: int, batch: int, vocabulary_size: int) -> Tensor:
    """Ids [T + 1, B]: each column repeats one sequence of tokens from its own starting point."""
    generator = torch.Generator().manual_seed(0)
    phrase = torch.randperm(vocabulary_size, generator=generator)
    starts = torch.randint(vocabulary_size, (1, batch), generator=generator)
    return phrase[(torch.arange(timesteps + 1)[:, None] + starts) % vocabulary_size]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--timesteps", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


def main() -> int:
    """Train, print the loss as it falls, and return the exit status."""
    options = parse_arguments()
    lower, upper = two_devices(options.device)
    torch.manual_seed(0)
    model = TwoDeviceLanguageModel(options.vocabulary, options.hidden, lower, upper)
    ids = pattern(options.timesteps, options.batch, options.vocabulary)
    inputs, targets = ids[:-1], ids[1:].to(upper)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    losses = []
    started = time.perf_counter()
    for step in range(options.steps):
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    step_ms = 1000 * (time.perf_counter() - started) / options.steps

    print(f"lower layers on {lower}, upper layers on {upper}: {step_ms:.1f} ms a training step")
    print(f"loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")
    call_ms, difference = score_served(whole_model(model), [str(lower), str(upper)], inputs)
    print(f"served over {lower} and {upper}: {call_ms:.1f} ms a call of {options.batch} rows")
    print(f"largest difference of a logit, relative: {difference:.1e}")
    learnt = losses[-1] < losses[0] / 2
    return 0 if learnt and difference <= FLOAT32_MAX_ABS else 1


if __name__ == "__main__":
    sys.exit(main())
