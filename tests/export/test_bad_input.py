"""What a user can hand to the command by mistake: status 2, one message, no file left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from click.testing import CliRunner

from qrnn_export import exporter
from qrnn_export.cli import main
from qrnn_export.torchscript_file import refuse_unsupported
from qrnn_serve import save
from support.exported import MODELS, make_model

OURS = MODELS["stack one"]


def checkpoint(path):
    save(make_model(OURS), path)
    return path.read_bytes()


def an_empty_file(path):
    path.write_bytes(b"")


def a_text(path):
    path.write_text("epoch,loss\n1,0.5\n")


def a_folder(path):
    path.mkdir()


def nothing(path):
    del path


def a_cut_checkpoint(path):
    path.write_bytes(checkpoint(path)[:-200])


def a_newer_checkpoint(path):
    checkpoint(path)
    content = torch.load(path, weights_only=True)
    torch.save({**content, "format_version": 99}, path)


def a_zip_bomb(path):
    """Zeros that a few kilobytes unpack to."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("model/data/0", bytes(8 << 20))


def a_huge_tensor(path):
    """A terabyte, says the file, that holds one number of it."""
    torch.save({"layers.0.linear.weight": torch.zeros(1).as_strided((12, 1 << 34), (0, 0))}, path)


def a_loss_alone(path):
    torch.save({"loss": torch.zeros(1)}, path)


def a_safetensors_header_of_a_terabyte(path):
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{" + bytes(64))


def a_pickled_module(path):
    torch.save(torch.nn.Linear(2, 2), path)


def an_lstm(path):
    torch.save(torch.nn.LSTM(4, 3).state_dict(), path)


def an_sru(path):
    torch.save({"rnn_lst.0.weight": torch.randn(4, 12), "rnn_lst.0.weight_c": torch.randn(6)}, path)


def a_bare_layer(path):
    torch.save({"layers.0.linear.weight": torch.randn(12, 8)}, path)


def weights_that_are_not_numbers(path):
    torch.save({"layers.0.linear.weight": torch.full((12, 8), torch.nan)}, path)


def an_artefact(path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


BAD_FILES = [
    (nothing, "no such file"),
    (a_folder, "this is a folder; name the model file in it"),
    (an_empty_file, "the file is empty"),
    (a_text, "expected a torch checkpoint"),
    (a_cut_checkpoint, "cut off or damaged"),
    (a_newer_checkpoint, "99"),
    (a_zip_bomb, "compressed parts, which torch.save never writes"),
    (a_huge_tensor, "the file does not hold all of its values"),
    (a_loss_alone, "no layout that is known"),
    (a_safetensors_header_of_a_terabyte, "safetensors file is cut off or damaged"),
    (a_pickled_module, "--trust-pickle"),
    (an_lstm, "LSTM weights found, not QRNN"),
    (an_sru, "SRU"),
    (a_bare_layer, "--window"),
    (weights_that_are_not_numbers, "holds NaN or infinity"),
    (an_artefact, "this is a TorchScript file, which is an output of this command"),
]
FACTS = ("--hidden", "4", "--window", "1", "--zoneout", "0", "--output-gate")


@pytest.mark.parametrize(("make", "message"), BAD_FILES, ids=lambda x: getattr(x, "__name__", ""))
def test_bad_files(make, message, tmp_path):
    """What it is, and the way out where there is one; inspect does not fail on it either."""
    path = tmp_path / "model.pt"
    make(path)
    before = sorted(tmp_path.iterdir())
    facts = FACTS if make in (a_huge_tensor, weights_that_are_not_numbers) else ()

    done = CliRunner().invoke(main, [str(path), *facts])
    looked = CliRunner().invoke(main, ["inspect", str(path), *facts])

    assert done.exit_code == 2, done.output
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert looked.exit_code in (0, 2)
    assert "Traceback" not in looked.output
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["model.ts.pt", "model.onnx", "model.onnx.proof.json"])
def test_a_path_that_exists(name, tmp_path):
    """Named, with both ways out; it stays as it was."""
    checkpoint(tmp_path / "model.pt")
    (tmp_path / name).write_text("mine")

    done = CliRunner().invoke(main, [str(tmp_path / "model.pt")])

    assert done.exit_code == 2
    assert f"{name} exists already; add --overwrite to replace, or -o DIR" in done.output
    assert (tmp_path / name).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_python_that_cannot_script(tmp_path, monkeypatch):
    """Which pair it is, and the format that works; ONNX alone is not asked."""
    checkpoint(tmp_path / "model.pt")
    monkeypatch.setattr(
        exporter, "refuse_unsupported", lambda *_: refuse_unsupported((3, 14), (2, 9))
    )

    done = CliRunner().invoke(main, [str(tmp_path / "model.pt")])

    assert done.exit_code == 2
    assert "Python 3.14 with torch 2.9 cannot script modules. Use --format onnx" in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_bfloat16_for_a_runtime_without_it(tmp_path):
    """What cannot be proven, and the flags that can."""
    checkpoint(tmp_path / "model.pt")

    done = CliRunner().invoke(main, [str(tmp_path / "model.pt"), "--dtype", "bfloat16"])

    assert done.exit_code == 2
    for advice in ("--dtype float16", "--dtype float32", "--format torchscript"):
        assert advice in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


# A limit on the size of a file fails in the system's write, as a full disk does.
LIMITED = """
import resource, signal, sys
from qrnn_export import cli, exporter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("names", ["torchscript", "onnx", "pt2"])
def test_no_room_for_the_file(names, tmp_path):
    """One message that says so; the folder is as it was, with the artefact of before."""
    checkpoint(tmp_path / "model.pt")
    (tmp_path / "model.onnx").write_text("mine")
    arguments = [str(tmp_path / "model.pt"), "--format", names, "--overwrite"]

    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "1000", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2, done.stderr
    assert "File too large" in done.stderr
    assert "nothing was written. Make room, or write elsewhere with -o DIR" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.pt"]
    assert (tmp_path / "model.onnx").read_text() == "mine"


def test_verify_names_what_it_takes(tmp_path):
    """A checkpoint, or any JSON, is no artefact."""
    checkpoint(tmp_path / "model.pt")
    (tmp_path / "model.stages.json").write_text(json.dumps({"format_version": 1}))
    for name, message in (
        ("model.pt", "model.pt.proof.json: missing"),
        ("model.stages.json", "model.stages.json.proof.json: missing"),
    ):
        done = CliRunner().invoke(main, ["verify", str(tmp_path / name)])

        assert done.exit_code == 2
        assert message in done.output
