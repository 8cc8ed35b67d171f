"""Where an artefact is compared: the devices that are asked for; the others by name."""

from __future__ import annotations

import json

import onnxruntime
import pytest
import torch
from click.testing import CliRunner

from qrnn_export import ExportOptions, ParityError, devices, export, verify
from qrnn_export.cases import POINTS
from qrnn_export.cli import main
from qrnn_export.devices import Devices, find_devices
from qrnn_export.proof import prove
from qrnn_serve import save
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.proof_file import proof_path
from support.exported import MODELS, make_model, write

NO_GPU = {"problem": "cuda:0 is not there: torch 2.13.0 sees 0 CUDA devices"}
H200 = {"name": "NVIDIA H200", "kernel": "CUDA, compiled by NVRTC"}


def facts_of(monkeypatch, **by_device):
    """Machines with other devices than this one."""
    monkeypatch.setattr(devices, "describe", lambda device: by_device[device.replace(":", "")])


def test_a_gpu_that_is_here_is_named(monkeypatch):
    """Not taken without being asked; what to say to have it is said."""
    facts_of(monkeypatch, cuda0=H200)

    found = find_devices()

    assert list(found.names) == ["cpu"]
    assert found.absent == ("not compared on a GPU: --device cpu,cuda:0 does, on NVIDIA H200",)


def test_a_gpu_that_is_not_here_is_said(monkeypatch):
    """With the reason: none, no CuPy, a driver that is too old."""
    facts_of(monkeypatch, cuda0=NO_GPU)

    found = find_devices()

    assert list(found.names) == ["cpu"]
    assert found.absent == (f"not compared on a GPU: {NO_GPU['problem']}",)


def test_wanted_devices_are_the_only_ones(monkeypatch):
    """In their order, "cuda" being the first."""
    facts_of(monkeypatch, cuda0=H200, cuda1={"name": "NVIDIA L4"})

    assert find_devices(["cpu"]).names.keys() == {"cpu"}
    assert find_devices(["cuda:1", "cuda"]).names == {
        "cuda:1": "NVIDIA L4",
        "cuda:0": "NVIDIA H200",
    }


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CPU", ""])
def test_names_of_no_device(name):
    """What is expected, and what came."""
    with pytest.raises(ConfigError, match="--device: expected cpu, cuda or cuda:N, got"):
        find_devices([name])


@pytest.mark.parametrize("command", [["model.pt", "-o", "out"], ["verify", "model.onnx"]])
def test_a_device_that_is_wanted_and_not_here_is_bad_input(command, tmp_path, monkeypatch):
    """Status 2, in the same words."""
    monkeypatch.chdir(tmp_path)
    save(make_model(MODELS["stack one"]), "model.pt")
    export("model.pt", options=ExportOptions(formats=("onnx",), devices=("cpu",)))

    done = CliRunner().invoke(main, [*command, "--device", "cuda:99"])

    assert done.exit_code == 2, done.output
    assert "--device cuda:99: cuda:99 is not there" in done.output
    assert not (tmp_path / "out").exists()


def test_the_proof_says_where_it_was_measured(tmp_path):
    """In the file, and on the screen; what was not compared stands beside it."""
    save(make_model(MODELS["stack one"]), tmp_path / "model.pt")

    done = CliRunner().invoke(main, [str(tmp_path / "model.pt"), "--format", "onnx"])

    assert done.exit_code == 0, done.output
    measured = json.loads(proof_path(tmp_path / "model.onnx").read_text())["measured"]
    assert list(measured["devices"]) == list(find_devices().names)
    assert "compared on cpu (" in done.output
    for line in find_devices().absent:
        assert line in measured["not compared"]
        assert line.split(":")[0] in done.output


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
    reason="this ONNX Runtime has it",
)
def test_an_artefact_that_runs_nowhere_is_not_proven(tmp_path):
    """ONNX on a device that the runtime has no provider for: said, and refused if it is all."""
    model = make_model(MODELS["stack one"])
    (path,) = write(model, tmp_path, "onnx")
    with_cpu, without = (tmp_path / name for name in "ab")
    with_cpu.mkdir(), without.mkdir()

    proof = prove(model, [path], with_cpu, devices=Devices({"cpu": "", "cuda:0": "a GPU"}))
    with pytest.raises(ParityError, match=r"run on no device(.|\n)*install onnxruntime-gpu"):
        prove(model, [path], without, devices=Devices({"cuda:0": "a GPU"}))

    assert {m.way for m in proof.measurements} == {"custom op", "function body"}
    assert len(proof.absent["model.onnx"]) == 2
    assert all("install onnxruntime-gpu" in line for line in proof.absent["model.onnx"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["stack windows", "ids, every pooling, head"])
@pytest.mark.parametrize(
    ("precision", "portable"),
    [(None, False), ("float16", False), ("int8", False), (None, True)],
)
def test_artefacts_are_proven_on_the_gpu(name, precision, portable, tmp_path):
    """Every way of every format, at every point, and once more by verify."""
    torch.manual_seed(1611)
    options = ExportOptions(
        formats=("torchscript", "onnx", "pt2"),
        portable=portable,
        int8=precision == "int8",
        dtype=precision if precision == "float16" else None,
        devices=("cpu", "cuda:0"),
    )
    report = export(make_model(MODELS[name]), tmp_path, options)

    ways = {m.way for m in report.proof.measurements}
    on_gpu = {way for way in ways if way.endswith(" on cuda:0")}
    assert {"forward on cuda:0", "forward_packed on cuda:0", "program on cuda:0"} <= on_gpu
    assert ("custom op on cuda:0" in on_gpu) == (not report.proof.absent["model.onnx"])
    assert len(report.proof.measurements) == len(ways) * len(POINTS)
    assert report.proof.devices.names["cuda:0"] == torch.cuda.get_device_name(0)
    again = verify(tmp_path / "model.ts.pt", devices=("cuda:0",))
    assert all(m.way.endswith("on cuda:0") for m in again.measurements)
