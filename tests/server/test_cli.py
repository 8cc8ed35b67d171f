"""The command line: help, names, missing libraries, the doctor."""

from __future__ import annotations

import dataclasses
import os
import subprocess

import pytest
from click.testing import CliRunner

from qrnn_serve import cli
from qrnn_serve.core.errors import ConfigError, KernelError
from qrnn_serve.server import doctor, loading
from qrnn_serve.server.config import ServerConfig
from support.server_process import command_line, environment, run_command


def test_help_shows_every_setting_with_its_default():
    """`qrnn-serve --help` documents each setting, without loading torch or gRPC."""
    shown = CliRunner().invoke(cli.main, ["--help"])

    assert shown.exit_code == 0
    for field in dataclasses.fields(ServerConfig):
        assert f"--{field.name.replace('_', '-')}" in shown.output
    assert "8001" in shown.output
    assert "doctor" in shown.output


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("vowels.ts.pt", "vowels"),
        ("vowels.onnx", "vowels"),
        ("vowels.pt", "vowels"),
        ("v1.2.safetensors", "v1.2"),
        ("model", "model"),
        (".onnx", ".onnx"),
    ],
)
def test_model_is_named_after_its_file(tmp_path, file, name):
    """Without --name, clients ask for the file's name without its endings."""
    assert cli._name_of(tmp_path / file) == name


@pytest.mark.parametrize("library", ["torch", "grpc_health"])
def test_missing_library_names_the_extra(tmp_path, library):
    """Without the serving libraries the error says what to install, with exit status 2."""
    (tmp_path / f"{library}.py").write_text(
        f'raise ModuleNotFoundError("no {library}", name="{library}")\n', encoding="utf-8"
    )
    environ = environment()
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environ["PYTHONPATH"]])
    model = tmp_path / "model.pt"
    model.write_bytes(b"PK")

    done = subprocess.run(
        command_line(model, "--port", 0),
        capture_output=True,
        text=True,
        env=environ,
        timeout=120,
        check=False,
    )

    assert done.returncode == 2
    assert library in done.stderr
    assert "qrnn-serve[cpu]" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_checks_the_kernels_of_the_cpu():
    """`qrnn-serve doctor` tells versions and kernel of the CPU and passes its self-check."""
    done = run_command("doctor", "--device", "cpu")

    assert done.returncode == 0
    for part in ("torch", "grpcio", "C library", "self-check: passed"):
        assert part in done.stdout


def test_doctor_tells_of_a_device_that_is_not_there():
    """A GPU that is missing is said to be so, with exit status 1; no device at all with 2."""
    missing = run_command("doctor", "--device", "cuda:99")
    unknown = run_command("doctor", "--device", "toaster")

    assert (missing.returncode, unknown.returncode) == (1, 2)
    assert "cuda:99 is not there" in missing.stdout
    assert "toaster" in unknown.stderr


def test_doctor_is_not_healthy_when_a_kernel_is_wrong(monkeypatch):
    """Kernels that give wrong numbers are reported as such."""

    def wrong(device):
        raise KernelError(f"wrong numbers on {device}")

    monkeypatch.setattr("qrnn_serve.kernels.self_check", wrong)
    report = doctor.examine("cpu")

    assert not report.healthy
    assert "self-check: FAILED: wrong numbers on cpu" in report.text


def test_model_is_not_served_with_wrong_kernels(monkeypatch, artefacts):
    """A kernel that fails its self-check stops the start: the server never becomes ready."""

    def wrong(device):
        raise KernelError(f"wrong numbers on {device}")

    monkeypatch.setattr("qrnn_serve.kernels.self_check", wrong)
    path = artefacts["ids"].paths["native"]
    [load] = loading.replica_loaders(path, ServerConfig(threads=1))

    with pytest.raises(KernelError, match="wrong numbers on cpu"):
        load()


FACTS = {"torch built for CUDA": "13.0", "driver supports CUDA": "13.0", "nvrtc": "13.0"}
MISMATCHES = {
    "none": ({}, {"cupy-cuda13x": "14.0"}, []),
    "newer driver": ({"driver supports CUDA": "14.1"}, {"cupy-cuda13x": "14.0"}, []),
    "older minor driver": ({"nvrtc": "13.2"}, {}, []),
    "old driver": (
        {"driver supports CUDA": "12.8"},
        {},
        ["torch is for CUDA 13.0 but the driver", "NVRTC is for CUDA 13.0 but the driver"],
    ),
    "other compiler": ({"nvrtc": "12.9"}, {}, ["torch is for CUDA 13.0 but CuPy compiles with"]),
    "other cupy": ({}, {"cupy-cuda12x": "13.4"}, ["torch is for CUDA 13.0 but cupy-cuda12x"]),
    "two cupys": (
        {},
        {"cupy-cuda12x": "13.4", "cupy-cuda13x": "14.0"},
        ["torch is for CUDA 13.0 but cupy-cuda12x", "both installed"],
    ),
}


@pytest.mark.parametrize(("facts", "installed", "found"), MISMATCHES.values(), ids=MISMATCHES)
def test_doctor_names_the_pair_that_disagrees_about_cuda(facts, installed, found):
    """torch, CuPy, NVRTC and driver are compared pair by pair; pairs that fit are not named."""
    told = doctor.mismatches(FACTS | facts, installed)

    assert len(told) == len(found)
    for text, part in zip(told, found, strict=True):
        assert part in text


def test_doctor_refuses_other_names():
    """The device to look at is checked before anything is loaded."""
    with pytest.raises(ConfigError, match="toaster"):
        doctor.examine("toaster")


@pytest.mark.gpu
def test_doctor_checks_the_kernels_of_a_gpu():
    """On a GPU the doctor tells architecture, compiler and driver, and its self-check passes."""
    done = run_command("doctor", "--device", "cuda:0")

    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("architecture: sm_", "nvrtc: ", "driver supports CUDA: ", "self-check: passed"):
        assert part in done.stdout
