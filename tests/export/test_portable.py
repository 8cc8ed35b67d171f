"""The portable TorchScript file: torch alone runs it, and only one that does so is proven."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from qrnn_export import ExportOptions, ParityError, export
from qrnn_export.artefact_manifest import make_manifest
from qrnn_export.proof import prove
from qrnn_export.torchscript_file import script, write_torchscript
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, HALF_RELATIVE_NORM
from qrnn_serve.scorers import load_scorer, memory
from support.artefacts import packed, random_model, random_rows, scores_by_hand
from support.exported import MODELS, make_model, random_batch, write
from support.qrnn_loop import loop_stack, state_row, weights_of

WITHOUT_OUR_PACKAGES = """
import sys
import numpy as np
import torch
path, given, answer = sys.argv[1:]
module = torch.jit.load(path)
batch = {name: torch.from_numpy(array) for name, array in np.load(given).items()}
output, state = module(batch["input"], batch["lengths"], batch["state"])
assert not any(name.startswith("qrnn") for name in sys.modules)
np.savez(answer, output=output.detach().numpy(), state=state.detach().numpy())
"""


def test_a_process_with_torch_alone_scores_the_float64_loop_s_numbers(tmp_path):
    """Loaded and run where no package of ours is, over uneven rows of up to 2,000 timesteps."""
    torch.manual_seed(1611)
    model = make_model(MODELS["stack windows"])
    (path,) = write(model, tmp_path, "torchscript", portable=True)
    lengths = [2000, 0, 1, 77]
    batch = random_batch(model, lengths, 2000, with_state=True)
    batch.state[:] = 0
    np.savez(tmp_path / "given.npz", **batch.feed())

    command = ["-I", "-W", "ignore", "-c", WITHOUT_OUR_PACKAGES, path, tmp_path / "given.npz"]
    subprocess.run([sys.executable, *command, tmp_path / "answer.npz"], check=True)

    answer = np.load(tmp_path / "answer.npz")
    weights = weights_of(model.qrnn)
    for row, length in enumerate(lengths):
        steps = batch.input[row, :length].double().numpy()
        want, after = loop_stack(model.config.qrnn, weights, steps)
        np.testing.assert_allclose(
            answer["output"][row, :length], want, rtol=0, atol=FLOAT32_MAX_ABS
        )
        assert not answer["output"][row, length:].any()
        np.testing.assert_allclose(
            answer["state"][row],
            state_row(model.config.qrnn, after).numpy(),
            rtol=0,
            atol=FLOAT32_MAX_ABS,
        )


def test_half_precision_is_computed_in_float32(tmp_path):
    """A float16 model stays within its norm of the float64 result of the same rounded weights."""
    torch.manual_seed(1611)
    model = make_model(MODELS["stack zoneout"], torch.float16)
    wide = make_model(MODELS["stack zoneout"], torch.float64)
    wide.load_state_dict(model.state_dict())
    loaded = torch.jit.load(write(model, tmp_path, "torchscript", portable=True)[0])
    batch = random_batch(model, [500, 20], 500, with_state=True, fill=0)

    with torch.inference_mode():
        got, _ = loaded(batch.input, batch.lengths, batch.state)
        eager, _ = model(batch.input, batch.lengths, batch.state)
        want, _ = wide(batch.input.double(), batch.lengths, batch.state.double())

    assert got.dtype == torch.float16
    # The layers' matrix products round too, in the module as well.
    off, module_off = (float((o.double() - want).norm() / want.norm()) for o in (got, eager))
    assert off <= module_off + HALF_RELATIVE_NORM["float16"]


def test_file_calls_no_operator_of_ours(tmp_path):
    """Nor does it hold the code of training; a file that is not portable does call them."""
    model = make_model(MODELS["stack zoneout"])
    called = []
    for portable in (True, False):
        (path,) = write(model, tmp_path, "torchscript", portable=portable)
        with zipfile.ZipFile(path) as archive:
            code = [archive.read(n) for n in archive.namelist() if n.endswith(".py")]
        called.append(any(b"ops.qrnn" in text for text in code))

    assert called == [False, True]


def test_a_file_that_only_claims_to_be_portable_is_not_proven(tmp_path):
    """Nothing has made our operators known when it is checked, in whatever order it is given."""
    model = make_model(MODELS["stack one"])
    (graph,) = write(model, tmp_path, "onnx")
    manifest = dataclasses.replace(make_manifest("torchscript", model, ()), portable=True)
    honest, claims = tmp_path / "honest.ts.pt", tmp_path / "claims.ts.pt"
    write_torchscript(script(model, portable=True), honest, manifest)
    write_torchscript(script(model), claims, manifest)

    with pytest.raises(ParityError, match="Unknown builtin op: qrnn::") as caught:
        prove(model, [graph, honest, claims], tmp_path)

    assert {m.artefact for m in caught.value.proof.failures()} == {"claims.ts.pt"}


def test_export_says_so_and_leaves_the_module_as_it_was(tmp_path):
    """In the manifest and the notice; ONNX beside it is not touched, nor is the module."""
    model = make_model(MODELS["stack one"])
    report = export(model, tmp_path, ExportOptions(portable=True))

    assert [a.manifest.portable for a in report.artefacts] == [True, False]
    assert "torch or libtorch alone" in report.notices[0]
    assert "import qrnn_serve" not in report.notices[0]
    assert not any(layer.in_plain_operators for layer in model.qrnn.layers)


def test_the_server_s_engine_scores_it_unchanged(tmp_path, monkeypatch):
    """Found by its name, its proof read, as any other TorchScript file; its memory is known."""
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1 << 30)
    model = random_model("features")
    options = ExportOptions(formats=("torchscript",), portable=True)
    scorer = load_scorer(export(model, tmp_path, options).artefacts[0].path, threads=1)
    rows = random_rows(model.config, [3, 1, 40, 129])

    scored = scorer.score(packed(rows))

    assert scorer.engine == "torchscript"
    most = memory.most_timesteps(model.config, "float32", 1 << 30, portable=True)
    assert scorer.max_timesteps == most
    expected = scores_by_hand(model, rows)
    np.testing.assert_allclose(scored.output, expected, rtol=0, atol=FLOAT32_MAX_ABS)


def test_portable_without_torchscript_is_refused():
    """The message names the flag and what to add."""
    with pytest.raises(ConfigError, match=r"--portable.*--format torchscript"):
        ExportOptions(formats=("onnx",), portable=True)
