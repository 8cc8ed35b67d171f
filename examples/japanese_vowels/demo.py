"""From a trained model to scores in a file, through every real part of qrnn-serve.

Trains a two-layer QRNN on the Japanese Vowels utterances, exports it to TorchScript and ONNX,
starts `qrnn-serve` on each artefact, scores the test utterances with `qrnn-score`, and prints how
the numbers compare. Any step that fails, or any number that is off, ends the program with a message
and status 1.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qrnn_client import Client
from qrnn_serve import SequenceModel, save
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
OUTPUT = Path("demo_output")
NAME = "vowels"
EPOCHS = 60
BATCH = 30
NOISE = 0.2
SPEAKERS = 9
MIN_ACCURACY = 0.97

console = Console()


class DemoFailure(Exception):  # noqa: N818 - the word the reader looks for
    """A step failed, or a number is off."""


@dataclass(frozen=True)
class Utterances:
    """Sequences and who said them: `features[i]` is [T_i, 12], `speakers[i]` 0 to 8."""

    features: list[np.ndarray]
    speakers: np.ndarray

    def padded(self, rows: np.ndarray | slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the chosen rows as [B, T, 12], their lengths [B] and their speakers [B]."""
        indices = np.arange(len(self.features))[rows]
        tensors = [torch.from_numpy(self.features[i]) for i in indices]
        lengths = torch.tensor([len(t) for t in tensors])
        batch = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
        return batch, lengths, torch.from_numpy(self.speakers[indices])


@dataclass(frozen=True)
class Row:
    """One line of the final table."""

    name: str
    accuracy: float
    max_difference: float
    seconds: float
    latencies_ms: list[float]


def read(path: Path) -> Utterances:
    """Read one of the Parquet files."""
    table = pq.read_table(path)
    features = [np.array(row, dtype=np.float32) for row in table["features"].to_pylist()]
    return Utterances(features, table["speaker"].to_numpy().astype(np.int64) - 1)


def train(data: Utterances) -> SequenceModel:
    """Train a two-layer, 64-unit, window-2, bidirectional QRNN with a mean over time."""
    torch.manual_seed(0)
    layer = LayerConfig(hidden_size=64, window=2)
    model = SequenceModel(
        SequenceModelConfig(
            qrnn=QRNNConfig(input_size=12, layers=(layer, layer), bidirectional="per_layer"),
            pooling="mean",
            head_size=SPEAKERS,
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    generator = np.random.default_rng(0)
    for _ in track(range(EPOCHS), "training", console=console):
        order = generator.permutation(len(data.features))
        for start in range(0, len(order), BATCH):
            batch, lengths, speakers = data.padded(order[start : start + BATCH])
            # 270 utterances are few: a little noise keeps the model from learning them by heart.
            logits, _ = model(batch + NOISE * torch.randn_like(batch), lengths)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, speakers).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def run(*command: str | Path) -> str:
    """Run a command of this project and return what it printed."""
    words = [str(Path(sys.executable).parent / command[0]), *map(str, command[1:])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoFailure(
            f"{' '.join(words)}: status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


@contextlib.contextmanager
def serve(artefact: Path) -> Iterator[str]:
    """Run `qrnn-serve` on `artefact`; yield its HOST:PORT, and stop it with SIGTERM."""
    log = artefact.with_suffix(".log")
    command = [str(Path(sys.executable).parent / "qrnn-serve"), str(artefact)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--port", "0", "--name", NAME],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if "listening on " not in line:
                raise DemoFailure(f"qrnn-serve {artefact} did not start:\n{log.read_text()}")
            yield line.split("listening on ")[1].strip()
        finally:
            process.terminate()
            status = process.wait(timeout=60)
    if status != 0:
        raise DemoFailure(f"qrnn-serve {artefact} stopped with status {status}:\n{log.read_text()}")


def served(artefact: Path, test: Utterances, expected: np.ndarray) -> Row:
    """Score the test file through a server of `artefact`, and time single utterances."""
    scores_path = OUTPUT / f"scores_{artefact.suffixes[0][1:]}.parquet"
    with serve(artefact) as target:
        started = time.perf_counter()
        run(
            "qrnn-score",
            HERE / "japanese_vowels_test.parquet",
            scores_path,
            *("--target", target, "--model", NAME, "--overwrite"),
        )
        seconds = time.perf_counter() - started
        latencies_ms = []
        with Client(target) as client:
            for features in track(test.features, f"timing {artefact.name}", console=console):
                began = time.perf_counter()
                client.predict(NAME, [features])
                latencies_ms.append(1000 * (time.perf_counter() - began))
    table = pq.read_table(scores_path)
    ids = pq.read_table(HERE / "japanese_vowels_test.parquet", columns=["id"])["id"]
    if table["id"].to_pylist() != ids.to_pylist():
        raise DemoFailure(f"{scores_path}: ids or their order changed")
    scores = np.array(table["score"].to_pylist(), dtype=np.float32)
    return Row(
        name=f"{artefact.name} through gRPC",
        accuracy=float((scores.argmax(1) == test.speakers).mean()),
        max_difference=float(np.abs(scores - expected).max()),
        seconds=seconds,
        latencies_ms=latencies_ms,
    )


def in_process(model: SequenceModel, test: Utterances) -> tuple[Row, np.ndarray]:
    """Score the test utterances with the module itself; return its line and its logits."""
    batch, lengths, speakers = test.padded(slice(None))
    latencies_ms = []
    with torch.inference_mode():
        started = time.perf_counter()
        logits, _ = model(batch, lengths)
        seconds = time.perf_counter() - started
        for features in test.features:
            began = time.perf_counter()
            model(torch.from_numpy(features)[None])
            latencies_ms.append(1000 * (time.perf_counter() - began))
    accuracy = float((logits.argmax(1) == speakers).float().mean())
    return Row("module in this process", accuracy, 0.0, seconds, latencies_ms), logits.numpy()


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title="370 test utterances of Japanese Vowels")
    for heading in (
        "scored by",
        "accuracy",
        "largest difference",
        "whole file, s",
        "p50, ms",
        "p99, ms",
    ):
        table.add_column(heading, justify="left" if heading == "scored by" else "right")
    for row in rows:
        p99 = float(np.percentile(row.latencies_ms, 99))
        table.add_row(
            row.name,
            f"{row.accuracy:.4f}",
            f"{row.max_difference:.1e}",
            f"{row.seconds:.2f}",
            f"{statistics.median(row.latencies_ms):.2f}",
            f"{p99:.2f}",
        )
    console.print(table)
    console.print("Whole file: the command's own start included. p50, p99: one utterance a call.")


def draw(rows: list[Row], predicted: np.ndarray, speakers: np.ndarray, path: Path) -> None:
    """Save the confusion matrix and the latency histogram."""
    counts = np.zeros((SPEAKERS, SPEAKERS), dtype=int)
    np.add.at(counts, (speakers, predicted), 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    left.imshow(counts, cmap="Blues")
    for truth in range(SPEAKERS):
        for guess in range(SPEAKERS):
            if count := counts[truth, guess]:
                colour = "white" if count > counts.max() / 2 else "black"
                left.text(guess, truth, str(count), ha="center", va="center", color=colour)
    ticks = range(SPEAKERS)
    left.set_xticks(ticks, [str(t + 1) for t in ticks])
    left.set_yticks(ticks, [str(t + 1) for t in ticks])
    left.set(xlabel="predicted speaker", ylabel="true speaker", title="Confusion, test utterances")
    slowest = max(float(np.percentile(row.latencies_ms, 99)) for row in rows)
    for row in rows:
        bins = np.linspace(0, slowest, 60).tolist()
        right.hist(row.latencies_ms, bins=bins, alpha=0.6, label=row.name)
    right.set(xlabel="milliseconds for one utterance", ylabel="utterances", title="Latency")
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def check(rows: list[Row]) -> None:
    """Fail when any row misses what the demo promises."""
    for row in rows:
        if row.accuracy < MIN_ACCURACY:
            raise DemoFailure(f"{row.name}: accuracy {row.accuracy:.4f}, expected {MIN_ACCURACY}")
        if not row.max_difference < FLOAT32_MAX_ABS:
            raise DemoFailure(
                f"{row.name}: scores differ from the module's by {row.max_difference:.1e}, "
                f"expected less than {FLOAT32_MAX_ABS:.0e}"
            )


def demo() -> None:
    """Every step, in order."""
    OUTPUT.mkdir(exist_ok=True)
    # Batches of 30 short utterances are too small to be worth a second thread.
    torch.set_num_threads(1)
    train_set = read(HERE / "japanese_vowels_train.parquet")
    test_set = read(HERE / "japanese_vowels_test.parquet")
    model = train(train_set)
    model_path = OUTPUT / f"{NAME}.pt"
    save(model, model_path)
    console.print(run("qrnn-export", model_path, "--overwrite"))
    module_row, logits = in_process(model, test_set)
    artefacts = (OUTPUT / f"{NAME}.ts.pt", OUTPUT / f"{NAME}.onnx")
    rows = [module_row, *(served(artefact, test_set, logits) for artefact in artefacts)]
    show(rows)
    picture = OUTPUT / "demo.png"
    draw(rows, logits.argmax(1), test_set.speakers, picture)
    console.print(f"picture: {picture}; scores: {OUTPUT}/scores_*.parquet")
    check(rows)


def main() -> int:
    """Run the demo; return the exit status."""
    try:
        demo()
    except DemoFailure as failure:
        console.print(f"[bold red]demo failed:[/] {failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
