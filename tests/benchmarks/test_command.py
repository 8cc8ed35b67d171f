"""The command: its arguments, its gate, and a whole run with the CPU in the GPU's place."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch

import kernels
from kernel_cases import Case, Shape


@pytest.fixture
def with_gpu(monkeypatch, bench):
    """A GPU is said to be there, and the stand-in is used for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(kernels, "_prepared_bench", lambda quick: bench)
    cases = [Case(Shape(4, 2, 3), dtype, "fo_pool") for dtype in ("float32", "bfloat16")]
    monkeypatch.setitem(kernels.TABLES, "pool", kernels.Table(lambda quick: cases, 0.1))


def pretend_tests(monkeypatch, code):
    monkeypatch.setattr(kernels, "test_command", lambda: [sys.executable, "-c", code])


def test_needs_a_gpu(capsys, monkeypatch):
    """Without a GPU nothing is run and nothing is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert kernels.main([]) == 2
    assert "CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "code",
    [
        "print('1 failed, 3 passed'); raise SystemExit(1)",
        "print('7 skipped in 0.1s')",
        "raise SystemExit(5)",
    ],
)
@pytest.mark.usefixtures("with_gpu")
def test_no_speed_without_green_tests(code, monkeypatch, capsys, tmp_path):
    """A failed test, or no test at all, and there is no figure and no file."""
    pretend_tests(monkeypatch, code)

    assert kernels.main(["--tables", "pool", "--output", str(tmp_path)]) == 1

    captured = capsys.readouterr()
    assert "no speed is measured" in captured.err
    assert " us" not in captured.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("with_gpu")
def test_whole_run(monkeypatch, capsys, tmp_path):
    """Results, tables and a plot are written; each cell has its line of progress."""
    pretend_tests(monkeypatch, "print('5 passed in 0.1s')")

    assert kernels.main(["--tables", "pool", "--output", str(tmp_path), "--commit", "abc"]) == 0

    results = json.loads((tmp_path / "kernels-some-gpu-pool.json").read_text())
    assert results["environment"]["commit"] == "abc"
    assert results["tests"]["summary"] == "5 passed in 0.1s"
    assert [cell["dtype"] for cell in results["tables"]["pool"]] == ["float32", "bfloat16"]
    assert (tmp_path / "kernels-some-gpu-pool.md").exists()
    assert (tmp_path / "kernels-some-gpu-pool-pool.png").exists()
    assert "[2/2, " in capsys.readouterr().out


@pytest.mark.usefixtures("with_gpu")
def test_a_cell_that_fails_does_not_stop_the_run(monkeypatch, capsys, tmp_path):
    """Its line says what happened, and the command fails at the end."""
    pretend_tests(monkeypatch, "print('5 passed in 0.1s')")
    measure = kernels.MEASURES["pool"]

    def fails_once(case, bench):
        if case.dtype == "float32":
            raise RuntimeError("broken")
        return measure(case, bench)

    monkeypatch.setitem(kernels.MEASURES, "pool", fails_once)

    assert kernels.main(["--tables", "pool", "--output", str(tmp_path)]) == 1
    assert "RuntimeError: broken" in capsys.readouterr().out


def test_tables_are_chosen_in_their_order():
    """Names are checked, and the order is that of the whole run."""
    assert kernels._parse(["--tables", "graph,pool"]).tables == ["pool", "graph"]
    assert kernels._parse([]).tables == list(kernels.TABLES)


@pytest.mark.parametrize("arguments", [["--tables", "pool,speed"], ["--skip-tests"]])
def test_unknown_arguments(arguments, capsys):
    """A table that does not exist, or a way around the tests, is refused."""
    with pytest.raises(SystemExit):
        kernels._parse(arguments)

    assert "error" in capsys.readouterr().err


def test_pytest_flags_follow_the_plugins(monkeypatch):
    """A plugin that is not installed is not named."""
    present = {"xdist", "pytest_asyncio", "pytest_timeout"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in present or None)
    command = kernels.test_command()
    assert "-n" in command
    assert "no:randomly" not in command
    assert "-o" not in command

    present.clear()
    present.add("pytest_randomly")

    command = kernels.test_command()
    assert "-n" not in command
    assert "no:randomly" in command
    assert "addopts=--import-mode=importlib" in command
