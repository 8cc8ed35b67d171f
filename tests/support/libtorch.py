"""Programs without our Python: the C++ program of docs/libtorch.md, and torch alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

DOCS = Path(__file__).parents[2] / "docs/libtorch.md"


def docs_block(language: str, start: str) -> str:
    """The block of the page that begins with this text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if block.startswith(start))
    return block


def clean_environment() -> dict[str, str]:
    """The variables of this process, with its Python first on PATH and our packages left out."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    dropped = ("PYTHONPATH", "LD_PRELOAD")
    return {k: v for k, v in os.environ.items() if k not in dropped} | {"PATH": path}


def compile_host(folder: Path) -> Path:
    """The program of the page, compiled with the command of the page."""
    (folder / "score.cpp").write_text(docs_block("cpp", "// score MODEL"))
    command = docs_block("sh", "TORCH=")
    environment = clean_environment() | {"TORCH": str(Path(torch.__file__).parent)}
    subprocess.run(["bash", "-e", "-c", command], cwd=folder, env=environment, check=True)
    return folder / "score"


@dataclass(frozen=True)
class Host:
    """The compiled program, and the operator library."""

    program: Path
    library: Path

    def run(self, model, device, batches, *, library=True, preload=False, code=0):
        """Score batches (input, lengths, state): the results, and what it said on stderr."""
        given, results = model.parent / "batches.pt", model.parent / "results.pt"
        torch.save(batches, given)
        results.unlink(missing_ok=True)
        environment = clean_environment()
        if preload:
            torch_libraries = str(Path(torch.__file__).parent / "lib")
            environment |= {"LD_PRELOAD": str(self.library), "LD_LIBRARY_PATH": torch_libraries}
        done = subprocess.run(
            [self.program, model, device, given, results, *([self.library] if library else [])],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return torch.load(results, map_location="cpu") if code == 0 else None, done.stderr

    def run_all(self, given, device, *, library):
        """Results for each (model, batches), a process each, several at once."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            done = pool.map(lambda pair: self.run(pair[0], device, pair[1], library=library), given)
        for results, said in done:
            assert said == ""
            yield results


_CALL_ALL = """
import sys, torch
torch.ops.load_library(sys.argv[1])
results = []
for name, arguments in torch.load(sys.argv[2], map_location=sys.argv[4]):
    try:
        result = getattr(torch.ops.qrnn, name).default(*arguments)
        results.append(result if isinstance(result, tuple) else (result,))
    except RuntimeError as error:
        results.append(str(error))
schemas = [str(getattr(torch.ops.qrnn, n).default._schema) for n in ("forget_mult", "fo_pool")]
torch.save((schemas, results), sys.argv[3])
"""


def call_operators(library: Path, calls, folder: Path, device: str):
    """Run calls (operator, arguments) in a process that knows torch and the library alone.

    Returns:
        The operators' schemas, and for each call its results, a tuple, or its error's text.
    """
    given, results = folder / "calls.pt", folder / "results.pt"
    torch.save(calls, given)
    subprocess.run(
        [sys.executable, "-W", "error", "-c", _CALL_ALL, library, given, results, device],
        env=clean_environment(),
        check=True,
    )
    return torch.load(results, map_location="cpu")
