"""Train a language model whose layers lie on two devices, with a real step across both.

The embedding and the lower layers are on the first device, the upper layers and the decoder on the
second; autograd carries the gradients back over the border.

    python examples/model_parallel.py --device cuda            the first two GPUs
    python examples/model_parallel.py --device cpu

The text is a repeated pattern, so the next token can be learnt. Ends with status 1 when the loss
does not fall to half.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor, nn

from qrnn_serve import QRNN


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
    return 0 if losses[-1] < losses[0] / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
