"""The README's examples run, in their order, as a reader would run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SET_UP = ("make", "pip", "git")


def blocks():
    return [(match[1], match[2]) for match in BLOCK.finditer((ROOT / "README.md").read_text())]


def write_utterances(path):
    rows = [np.random.default_rng(t).standard_normal((t, 12)) for t in (3, 8, 1)]
    features = pa.array(
        [r.astype(np.float32).tolist() for r in rows], pa.list_(pa.list_(pa.float32(), 12))
    )
    pq.write_table(pa.table({"id": ["a", "b", "c"], "features": features}), path)


class Reader:
    """Runs blocks in one folder and one Python namespace; the server gets a free port."""

    def __init__(self, folder):
        self.folder = folder
        self.namespace = {}
        self.target = None
        self.server = None
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path}

    def run(self, language, text):
        if self.target:
            text = text.replace("localhost:8001", self.target)
        if language == "python":
            exec(compile(text, "README.md", "exec"), self.namespace)
        elif text.startswith("qrnn-serve"):
            self.serve(shlex.split(text.replace("8001", "0")))
        else:
            subprocess.run(
                ["bash", "-e", "-c", text], cwd=self.folder, env=self.environment, check=True
            )

    def serve(self, command):
        self.server = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        self.target = self.server.stdout.readline().split("listening on ")[1].strip()

    def close(self):
        if self.server:
            self.server.terminate()
            assert self.server.wait(timeout=60) == 0
            self.server.stdout.close()


@pytest.fixture
def reader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    yield reader
    reader.close()


def test_readme_examples_run(reader, tmp_path):
    """Every block but the installation runs, and the last one has scored the file."""
    write_utterances(tmp_path / "utterances.parquet")

    for language, text in blocks():
        if not text.startswith(SET_UP):
            reader.run(language, text)

    scores = pq.read_table(tmp_path / "scores.parquet")
    assert scores["id"].to_pylist() == ["a", "b", "c"]
    prediction = reader.namespace["prediction"]
    assert [output.shape for output in prediction.outputs] == [(9,)] * 3
