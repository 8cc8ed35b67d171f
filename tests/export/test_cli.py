"""The command: its help, its messages, its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner

from qrnn_export import cli, writers
from qrnn_serve import QRNN, save
from support.exported import MODELS, make_model, write
from support.foreign_checkpoints import health_records

GOLDEN = Path(__file__).parents[1] / "golden/checkpoints"


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def lone_layer(tmp_path):
    """A state dict that does not say its sizes."""
    torch.save({"layers.0.linear.weight": torch.randn(12, 8)}, tmp_path / "old.pt")
    return tmp_path / "old.pt"


def test_command_exports_and_shows_what_it_proved(tmp_path):
    """In a process of its own: exit status 0, the parity table, the files, one notice of ours."""
    save(make_model(MODELS["stack windows"]), tmp_path / "model.pt")

    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "qrnn_export.cli", "model.pt", "-o", "out"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stderr
    for text in (
        "forward_packed",
        "custom op",
        "function body",
        "largest difference",
        "wrote out/",
    ):
        assert text in done.stdout
    assert done.stdout.count("deprecated TorchScript") == 1
    assert done.stdout.count("onnx_ops_library()") == 1
    assert done.stderr.strip() == ""
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "model.onnx",
        "model.onnx.proof.json",
        "model.ts.pt",
        "model.ts.pt.proof.json",
    ]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["export", "--help"]])
def test_help_teaches_with_examples(arguments):
    """The help of the command itself shows usage, examples and every flag."""
    output = run(*arguments)

    for text in (
        "qrnn-export model.pt",
        "Examples:",
        "--trust-pickle",
        "--zoneout",
        "--int8",
        "Exit status",
    ):
        assert text in output


def test_help_imports_no_torch():
    """Help answers at once."""
    heavy = {"torch", "onnx", "onnxruntime"}
    code = f"import sys, qrnn_export.cli; assert not {heavy} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_missing_sizes_are_asked_for_by_flag(lone_layer):
    """Width, window, gate and zoneout that the file cannot tell, all in one message."""
    output = run(lone_layer, code=2)

    for flag in ("--hidden", "--output-gate", "--window", "--zoneout"):
        assert flag in output
    assert "can be" in output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("awd_lstm_lm/pickled_module.pt", "--trust-pickle"),
        ("awd_lstm_lm/pickled_list.pt", "runs whatever code"),
        ("pqrnn/meta.json", "expected a torch checkpoint"),
        ("nowhere.pt", "no such file"),
    ],
)
def test_files_that_cannot_be_used(name, message, tmp_path):
    """Status 2, one message without a traceback, nothing written."""
    output = run(GOLDEN / name, "-o", tmp_path / "out", code=2)

    assert message in output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


def test_an_lstm_is_refused_by_name(tmp_path):
    """Weights of another cell are not exported as a QRNN."""
    torch.save(torch.nn.LSTM(4, 3).state_dict(), tmp_path / "model.pt")

    assert "LSTM weights found, not QRNN" in run(tmp_path / "model.pt", code=2)


def test_a_cut_file_is_refused(tmp_path):
    """A checkpoint of ours that was copied in part says that it is damaged."""
    save(make_model(MODELS["stack one"]), tmp_path / "model.pt")
    whole = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(whole[: len(whole) // 2])

    assert "cut off or damaged" in run(tmp_path / "model.pt", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "tflite"], "--format: expected some of"),
        (["--dtype", "int4"], "is not one of"),
        (["--int8", "--dtype", "float16"], "choose one of the two"),
        (["--calibrate", "rows.parquet"], "--calibrate: nothing is converted"),
        (["--stages", "some"], "expected a whole number or auto, got 'some'"),
        (["--stages", "1"], "--stages: expected auto or at least 2, got 1"),
        (["--stages", "2", "--aot"], "--stages with --aot"),
        (["--triton", "models", "--format", "onnx,pt2"], "no backend of Triton runs pt2"),
        (["--window", "two"], "expected whole numbers"),
        (["--window", "0"], "at least 1"),
        (["--zoneout", "1.5"], "--zoneout: expected 0 to 1"),
        (["--layout", "keras"], "--layout: expected one of"),
        (["--hidden", "5", "--window", "1", "--zoneout", "0"], "--hidden 5 contradicts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_make_no_sense(arguments, message, lone_layer):
    """Each names the flag and what it takes."""
    assert message in run(lone_layer, *arguments, code=2)


def test_existing_artefacts_need_overwrite(lone_layer):
    """A file that is there is not replaced by accident."""
    lone_layer.with_name("old.onnx").write_bytes(b"mine")

    assert "--overwrite" in run(lone_layer, "--format", "onnx", code=2)
    assert lone_layer.with_name("old.onnx").read_bytes() == b"mine"


def test_a_failed_proof_is_status_1(monkeypatch, tmp_path):
    """The table shows where the numbers differ, and nothing appears."""
    save(make_model(MODELS["stack windows"]), tmp_path / "model.pt")
    build = writers.build_model

    def build_wrong(config, weights, layout):
        return build(config, {k: w * w.dtype.type(1.1) for k, w in weights.items()}, layout)

    monkeypatch.setattr(writers, "build_model", build_wrong)

    output = run(tmp_path / "model.pt", "--format", "onnx", code=1)

    assert "do not give the module's numbers" in output
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_a_missing_library_is_status_1(monkeypatch, tmp_path):
    """Without the built operators nothing can be proven, and the message says how to build them."""
    from qrnn_export import exporter
    from qrnn_serve.core.errors import KernelError

    def no_library(*_, **__):
        raise KernelError("libqrnn_kernels.so was not found")

    save(make_model(MODELS["stack one"]), tmp_path / "model.pt")
    monkeypatch.setattr(exporter, "prove", no_library)

    assert "was not found" in run(tmp_path / "model.pt", "--format", "onnx", code=1)


def test_inspect_says_what_is_missing(lone_layer):
    """Names, shapes, layout and the flags that an export needs."""
    output = run("inspect", lone_layer)

    for text in ("layers.0.linear.weight", "[12, 8]", "salesforce", "cannot be exported yet"):
        assert text in output
    assert "--window" in output


def test_inspect_shows_the_inferred_configuration(tmp_path):
    """With the flags it needs, or a checkpoint of ours, the whole configuration is shown."""
    torch.save(QRNN(5, 4).state_dict(), tmp_path / "old.pt")
    save(make_model(MODELS["ids, every pooling, head"]), tmp_path / "model.pt")

    foreign = run("inspect", tmp_path / "old.pt", "--hidden", "4", "--zoneout", "0.25")
    ours = run("inspect", tmp_path / "model.pt")

    assert '"zoneout": 0.25' in foreign
    assert '"pooling": "last_max_mean"' in ours
    assert "checkpoint of qrnn_serve.save" in ours


def test_inspect_reads_artefacts(tmp_path):
    """The manifest of either artefact is shown; another ONNX file is refused."""
    write(make_model(MODELS["stack one"]), tmp_path, "torchscript", "onnx")
    onnx.save(onnx.ModelProto(ir_version=8), tmp_path / "other.onnx")

    for name, kind in (("model.ts.pt", "TorchScript"), ("model.onnx", "ONNX")):
        output = run("inspect", tmp_path / name)
        assert f"{kind} artefact" in output
        assert "state_out" in output
    assert "no manifest" in run("inspect", tmp_path / "other.onnx", code=2)


def test_inspect_names_files_of_no_known_layout(tmp_path):
    """Tensors are listed even where no layout fits."""
    torch.save({"tower.weight": torch.zeros(3, 2)}, tmp_path / "other.pt")

    output = run("inspect", tmp_path / "other.pt")

    assert "tensors of no known layout" in output
    assert "no layout that is known" in output
    assert "tower.weight" in output


def test_inspect_names_a_layout_that_is_not_supported(tmp_path):
    """The layout is named, with the feature that is missing."""
    torch.save({"layers.0.conv1d_z.weight": torch.randn(4, 3, 2)}, tmp_path / "adapter.pt")

    output = run("inspect", tmp_path / "adapter.pt")

    assert "layout 'sdqes'" in output
    assert "another activation than tanh" in output


def test_ids_per_timestep_is_a_flag(tmp_path):
    """What a health-record model needs is asked for, and given."""
    torch.save(health_records().tensors, tmp_path / "ehr.pt")

    asked = run("inspect", tmp_path / "ehr.pt")
    output = run("inspect", tmp_path / "ehr.pt", "--ids-per-timestep", "4")

    assert "--ids-per-timestep" in asked
    assert '"ids_per_timestep": 4' in output
