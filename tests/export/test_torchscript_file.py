"""The TorchScript file: scripted for every size, self-describing, the same bytes every time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qrnn_export
import qrnn_serve
from qrnn_export.artefact_manifest import make_manifest
from qrnn_export.onnx_file import write_onnx
from qrnn_export.onnx_model import build_model
from qrnn_export.torchscript_file import (
    refuse_unsupported,
    script,
    set_manifest,
    torch_release,
    write_torchscript,
)
from qrnn_serve import save
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.manifest import MANIFEST_KEY, Manifest
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.kernels.library import native_library
from qrnn_serve.model.config import SequenceModelConfig
from qrnn_serve.model.precision import convert
from support.closeness import max_abs
from support.devices import DEVICES
from support.exported import MODELS, make_model, random_batch, write
from support.qrnn_loop import weights_of
from support.stacks import STACKS

MANIFEST_PART = f"archive/extra/{MANIFEST_KEY}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_file_gives_the_numbers_of_the_module(name, portable, device, tmp_path):
    """Every kind of model, padded and packed, with and without a state."""
    model = make_model(MODELS[name])
    path = write(model, tmp_path, "torchscript", portable=portable)[0]
    loaded = torch.jit.load(path, map_location=device)

    for with_state in (False, True):
        batch = random_batch(model, [4, 9, 1], 9, with_state=with_state)
        want, want_state = model(batch.input, batch.lengths, batch.state)
        real = torch.arange(9) < batch.lengths[:, None]
        offsets = torch.tensor([0, 4, 13, 14]).to(device)
        state = None if batch.state is None else batch.state.to(device)

        got = loaded(batch.input.to(device), batch.lengths, state)
        padded, padded_state = (value.cpu() for value in got)
        got = loaded.forward_packed(batch.input[real].to(device), offsets, state)
        packed, packed_state = (value.cpu() for value in got)

        want_packed = want[real] if model.pooling == "none" else want
        assert max_abs(padded, want.detach()) <= FLOAT32_MAX_ABS
        assert max_abs(packed, want_packed.detach()) <= FLOAT32_MAX_ABS
        assert max_abs(padded_state, want_state.detach()) <= FLOAT32_MAX_ABS
        assert max_abs(packed_state, want_state.detach()) <= FLOAT32_MAX_ABS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("portable", [False, True])
def test_every_size_in_one_loaded_file(portable, device, tmp_path):
    """T from 1 to 500 and B from 1 to 65, so nothing of an example is frozen in."""
    model = make_model(MODELS["ids, every pooling, head"])
    path = write(model, tmp_path, "torchscript", portable=portable)[0]
    loaded = torch.jit.load(path, map_location=device)
    for timesteps in (1, 2, 5, 7, 500):
        for rows in (1, 2, 3, 65):
            for with_state in (False, True):
                lengths = [timesteps - row % timesteps for row in range(rows)]
                batch = random_batch(model, lengths, timesteps, with_state=with_state)
                want = model(batch.input, batch.lengths, batch.state)

                state = None if batch.state is None else batch.state.to(device)
                got = loaded(batch.input.to(device), batch.lengths, state)

                for actual, wanted in zip(got, want, strict=True):
                    assert max_abs(actual.detach().cpu(), wanted.detach()) <= FLOAT32_MAX_ABS


@pytest.mark.parametrize("portable", [False, True])
def test_one_step_at_a_time_is_one_call(portable, tmp_path):
    """A sequence fed by single timesteps with the carried state gives the same outputs."""
    model = make_model(MODELS["stack windows"])
    loaded = torch.jit.load(write(model, tmp_path, "torchscript", portable=portable)[0])
    batch = random_batch(model, [7, 7, 7], 7, with_state=True)
    whole, last_state = loaded(batch.input, None, batch.state)

    state = batch.state
    for t in range(7):
        output, state = loaded(batch.input[:, t : t + 1], None, state)
        assert max_abs(output[:, 0], whole[:, t].detach()) <= SAME_ROWS_FLOAT32_MAX_ABS

    assert max_abs(state, last_state.detach()) <= SAME_ROWS_FLOAT32_MAX_ABS


def test_file_carries_its_manifest(tmp_path):
    """Config, schema and state layout are read back from the file alone."""
    model = make_model(MODELS["ids, every pooling, head"])
    extra = {MANIFEST_KEY: ""}
    torch.jit.load(write(model, tmp_path, "torchscript")[0], _extra_files=extra)

    manifest = Manifest.from_json(extra[MANIFEST_KEY])

    assert manifest.kind == "torchscript"
    assert [(s.name, s.dtype, s.shape, s.optional) for s in manifest.inputs] == [
        ("input", "int64", ("batch", "time"), False),
        ("lengths", "int64", ("batch",), True),
        ("state", "float32", ("batch", model.state_size), True),
    ]
    assert [(s.name, s.shape) for s in manifest.outputs] == [
        ("logits", ("batch", 3)),
        ("state_out", ("batch", model.state_size)),
    ]
    assert manifest.state_size == model.state_size
    assert manifest.versions["torch"] == torch.__version__


WRITE_ALL = """
import sys
from pathlib import Path
import qrnn_export, qrnn_serve
from qrnn_export.importer import import_file
from qrnn_export.options import ExportOptions, ImportHints
from qrnn_export.writers import WRITERS
checkpoint, output, installed = map(Path, sys.argv[1:])
for package in (qrnn_export, qrnn_serve):
    assert Path(package.__file__).parent.parent == installed, package.__file__
imported = import_file(checkpoint, ImportHints(), trust_pickle=False)
for name in ("torchscript", "onnx", "pt2"):
    writer = WRITERS[name]
    writer(imported, output / f"model{writer.suffix}", ExportOptions())
"""


def installed_at(directory):
    """A copy of the packages with what was built for them, elsewhere on this machine."""
    for package in (qrnn_export, qrnn_serve):
        source = Path(package.__file__).parent
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, directory / source.name, ignore=ignored)
    shutil.copy(native_library(), directory / "qrnn_serve/kernels")
    return directory


def test_installations_at_two_places_write_the_same_bytes(tmp_path):
    """No format depends on where the packages lie, or on the hash seed of the process."""
    save(make_model(MODELS["ids, every pooling, head"]), tmp_path / "model.pt")
    written = []
    for seed in ("1", "2"):
        packages, output = installed_at(tmp_path / f"place {seed}"), tmp_path / seed
        output.mkdir()
        arguments = [tmp_path / "model.pt", output, packages]
        # -S: the installation of this process puts itself in front.
        subprocess.run(
            [sys.executable, "-S", "-c", WRITE_ALL, *map(str, arguments)],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join([str(packages), *sys.path]),
            },
            cwd=output,
            check=True,
        )
        written.append({file.name: file.read_bytes() for file in sorted(output.iterdir())})

    assert list(written[0]) == ["model.onnx", "model.pt2", "model.ts.pt"]
    assert written[0] == written[1]
    assert not any(b"/place" in content for content in written[0].values())


def parts_of(path):
    """Checksum and size of every part of a TorchScript file."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {entry.filename: (entry.CRC, entry.file_size) for entry in archive.infolist()}


def test_the_manifest_is_exchanged_and_nothing_else(tmp_path):
    """A shorter or longer one takes its place, whatever stood there before leaves no byte."""
    model = make_model(MODELS["stack one"])
    (path,) = write(model, tmp_path, "torchscript")
    before = parts_of(path)
    first, content = manifest_in(path), path.read_bytes()

    for parity in ({}, {"a case": 1e-6}, dict.fromkeys("abc", 0.0)):
        manifest = replace(first, parity=parity)
        set_manifest(path, manifest)

        assert manifest_in(path) == manifest
        after = parts_of(path)
        assert list(after) == list(before)
        assert [n for n in after if after[n] != before[n]] == ([MANIFEST_PART] if parity else [])
    set_manifest(path, first)

    assert path.read_bytes() == content


def manifest_in(path):
    """The manifest, as the runtime finds it."""
    extra = {MANIFEST_KEY: ""}
    torch.jit.load(path, _extra_files=extra)
    return Manifest.from_json(extra[MANIFEST_KEY])


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_tied_weights_are_stored_once(precision, tmp_path):
    """An embedding that is the head's weight too takes no second place in the file."""
    config = SequenceModelConfig(qrnn=STACKS["one"], vocabulary_size=50, head_size=50)
    width, hidden = config.qrnn.input_size, config.qrnn.layers[-1].hidden_size
    table = torch.rand(50, width)
    model = make_model(config)
    assert width == hidden
    model.load_state_dict(
        model.state_dict() | {"embedding.weight": table, "head.weight": table}, assign=True
    )
    (path,) = write(convert(model, precision), tmp_path, "torchscript")
    table = table.to(getattr(torch, precision))

    sizes = [size for _, size in parts_of(path).values()]
    loaded = torch.jit.load(path).state_dict()

    assert sizes.count(table.nbytes) == 1
    assert torch.equal(loaded["embedding.weight"], table)
    assert torch.equal(loaded["head.weight"], table)


@pytest.mark.parametrize(
    ("python", "release"), [((3, 14), (2, 9)), ((3, 15), (2, 10)), ((3, 15), (3, 0))]
)
def test_unsupported_pairs_are_refused_before_any_work(python, release):
    """Where scripting crashes, the message names the pair and another format."""
    with pytest.raises(ConfigError, match=r"cannot script modules. Use --format onnx"):
        refuse_unsupported(python, release)


@pytest.mark.parametrize(
    ("python", "release"), [((3, 11), (2, 10)), ((3, 13), (2, 13)), ((3, 14), (2, 10))]
)
def test_supported_pairs_pass(python, release):
    """Pairs on which torch can script are let through, and this one is."""
    refuse_unsupported(python, release)
    refuse_unsupported(sys.version_info[:2], torch_release())


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    """Both writers say that the file could not be written."""
    model = make_model(MODELS["stack one"])
    manifest = make_manifest("torchscript", model, ())
    graph = build_model(model.config, weights_of(model), manifest.state)

    with pytest.raises(OSError, match="No space left"):
        write_torchscript(script(model), Path("/dev/full"), manifest)
    with pytest.raises(OSError, match="No space left"):
        write_onnx(graph, Path("/dev/full"), manifest)


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True])
def test_file_runs_on_a_gpu(portable, tmp_path):
    """A file written on the CPU moves to a GPU and gives the same numbers there."""
    model = make_model(MODELS["ids, every pooling, head"])
    (path,) = write(model, tmp_path, "torchscript", portable=portable)
    loaded = torch.jit.load(path, map_location="cuda")
    for timesteps, lengths in ((1, [1]), (9, [4, 9, 1]), (500, [500, 3])):
        batch = random_batch(model, lengths, timesteps, with_state=True)
        want = model(batch.input, batch.lengths, batch.state)

        got = loaded(batch.input.cuda(), batch.lengths, batch.state.cuda())

        for actual, wanted in zip(got, want, strict=True):
            assert max_abs(actual, wanted.detach()) <= FLOAT32_MAX_ABS
