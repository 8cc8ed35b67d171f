"""Every kind of wrong, damaged, foreign and hostile file gets its own clear error."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from qrnn_serve import SequenceModel, load, save
from qrnn_serve.core.config import to_mapping
from qrnn_serve.core.errors import CheckpointError, UntrustedFileError
from qrnn_serve.model.checkpoint import weights_sha256
from qrnn_serve.model.stored import FORMAT
from support.whole_models import MODELS

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
SUFFIXES = [".pt", ".safetensors"]
SMALL = MODELS["windows-last_max_mean-ids-head"]


def write(path, **changes):
    """A checkpoint of the small model with parts replaced, in the format of the path's ending."""
    tensors = SequenceModel(SMALL).state_dict()
    content = {
        "format": FORMAT,
        "format_version": 1,
        "config": to_mapping(SMALL),
        "state_dict": tensors,
    }
    content |= changes
    if "weights_sha256" not in content:
        content["weights_sha256"] = weights_sha256(content["state_dict"])
    if path.suffix == ".pt":
        torch.save({k: dict(v) if k == "state_dict" else v for k, v in content.items()}, path)
        return
    tensors = content.pop("state_dict")
    metadata = {k: v if isinstance(v, str) else json.dumps(v) for k, v in content.items()}
    safetensors.torch.save_file(dict(tensors), path, metadata)


def changed(change):
    """The small model's weights after `change` edited the dict."""
    tensors = dict(SequenceModel(SMALL).state_dict())
    change(tensors)
    return tensors


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_helper_writes_what_load_takes(suffix, tmp_path):
    """Without changes the hand-made file is fine, so each error below has its own cause."""
    write(tmp_path / f"m{suffix}")

    assert load(tmp_path / f"m{suffix}").config == SMALL


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("head.bias"), "missing head.bias"),
        (lambda t: t.update(extra=torch.zeros(2)), "unexpected extra"),
        (
            lambda t: t.update({"head.bias": torch.zeros(4)}),
            r"head.bias has shape \[4\], the config says \[3\]",
        ),
        (lambda t: t.update({"head.bias": torch.zeros(3).double()}), "one floating dtype.*float64"),
        (
            lambda t: t.update({k: v.to(torch.int32) for k, v in t.items()}),
            "one floating dtype.*int32",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(change, message, suffix, tmp_path):
    """Missing, extra and mis-shaped tensors and odd dtypes, by name."""
    write(tmp_path / f"m{suffix}", state_dict=changed(change))

    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / f"m{suffix}")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "newer release.*format 2.*update qrnn-serve"),
        ({"format_version": "one"}, "checkpoint format is 'one'"),
        ({"format": "other"}, "not a checkpoint of qrnn_serve.save.*qrnn-export"),
        ({"config": {"qrnn": 3}}, "config.qrnn: expected a mapping"),
        ({"config": {**to_mapping(SMALL), "pooling": "sum"}}, "pooling.*sum"),
        ({"config": {**to_mapping(SMALL), "colour": 1}}, "unknown keys.*colour"),
        ({"weights_sha256": "0" * 64}, "not those that were saved"),
    ],
)
def test_wrong_version_config_and_hash_are_named(changes, message, suffix, tmp_path):
    """What the file says of itself is checked before it is believed."""
    write(tmp_path / f"m{suffix}", **changes)

    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / f"m{suffix}")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("size", "message"), [(10**12, "head.weight has shape"), (2**62, "sizes beyond any memory")]
)
def test_a_config_of_giant_sizes_takes_no_memory(size, message, suffix, tmp_path):
    """Shapes are compared before any weight is made, so a lie about sizes costs nothing."""
    config = to_mapping(SMALL)
    config["head_size"] = size
    write(tmp_path / f"m{suffix}", config=config)

    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / f"m{suffix}")


def test_a_giant_tensor_over_few_bytes_is_refused(tmp_path):
    """A tensor with strides of 0 declares more values than the file has."""
    config = to_mapping(SMALL)
    config["head_size"] = 10**11
    weights = changed(
        lambda t: t.update(
            {
                "head.weight": torch.zeros(1, 12).expand(10**11, 12),
                "head.bias": torch.zeros(1).expand(10**11),
            }
        )
    )
    write(tmp_path / "m.pt", config=config, state_dict=weights, weights_sha256="")

    with pytest.raises(CheckpointError, match="does not hold all values of head"):
        load(tmp_path / "m.pt")


def test_more_layers_than_tensors_is_refused(tmp_path):
    """A long list of layers in a small file is not built to find that out."""
    config = to_mapping(SMALL)
    config["qrnn"]["layers"] *= 1000
    write(tmp_path / "m.pt", config=config)

    with pytest.raises(CheckpointError, match="3000 layers, but the file has"):
        load(tmp_path / "m.pt")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_anywhere_is_damaged(suffix, tmp_path):
    """Truncated at many places, and with single bytes changed: never a wrong model."""
    whole = tmp_path / f"m{suffix}"
    write(whole)
    data = whole.read_bytes()
    broken = tmp_path / f"broken{suffix}"
    for cut in [0, 1, 5, 9, 100, *range(200, len(data), max(1, len(data) // 25)), len(data) - 1]:
        broken.write_bytes(data[:cut])
        with pytest.raises(CheckpointError):
            load(broken)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_flipped_bit_in_a_weight_is_found(suffix, tmp_path):
    """Neither format's reader looks at checksums of weights; the stored hash does."""
    path = tmp_path / f"m{suffix}"
    tensors = changed(lambda t: t.update({"head.bias": torch.tensor([1.25, 2.5, 1234.5])}))
    write(path, state_dict=tensors)
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<f", 1234.5))
    data[at] ^= 1
    path.write_bytes(data)

    with pytest.raises(CheckpointError, match="not those that were saved"):
        load(path)


class Exploit:
    """Says so in a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("modern", [True, False])
def test_pickled_code_is_named_and_never_run(modern, tmp_path):
    """A zip of torch.save and an old bare pickle: the error names risk and flag; nothing ran."""
    trap = tmp_path / "trap"
    torch.save(
        {"format": FORMAT, "x": Exploit(trap)},
        tmp_path / "m.pt",
        _use_new_zipfile_serialization=modern,
    )

    with pytest.raises(UntrustedFileError, match=r"runs? any code.*--trust-pickle"):
        load(tmp_path / "m.pt")
    assert not trap.exists()


def test_pickled_modules_of_other_programs_are_refused_by_name():
    """The original awd-lstm-lm's pickles: which classes they hold, and the flag."""
    with pytest.raises(UntrustedFileError, match=r"model\.RNNModel.*--trust-pickle"):
        load(GOLDEN / "awd_lstm_lm" / "pickled_module.pt")


@pytest.mark.parametrize(
    "path",
    [
        "awd_lstm_lm/state_dict_saved_in_training.pt",
        "fastai_v1/learner_saved_in_training.pth",
        "pqrnn/lightning.ckpt",
    ],
)
def test_checkpoints_of_other_programs_point_to_the_importer(path):
    """State dicts of others are shown by their first keys, with the command that reads them."""
    with pytest.raises(CheckpointError, match=r"not a checkpoint.*qrnn-export") as caught:
        load(GOLDEN / path)
    assert not isinstance(caught.value, UntrustedFileError)


def test_foreign_safetensors_point_to_the_importer(tmp_path):
    """A .safetensors file without our metadata."""
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "m.safetensors")

    with pytest.raises(CheckpointError, match=r"it holds \['w'\].*qrnn-export"):
        load(tmp_path / "m.safetensors")


def files_of_other_kinds(folder):
    """(path, what the error says) for files that are no checkpoint at all."""
    torch.jit.script(nn.Linear(2, 2)).save(folder / "scripted.pt")
    with (folder / "arrays.pt").open("wb") as file:
        np.savez(file, a=np.zeros(3))
    with zipfile.ZipFile(folder / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 1000)
    (folder / "text.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "empty.pt").touch()
    (folder / "header.pt").write_bytes(struct.pack("<Q", 10**12) + b"{" + b" " * 100)
    torch.save([1, 2], folder / "list.pt")
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "format_version": 1, "state_dict": [1]}, buffer)
    (folder / "no_weights.pt").write_bytes(buffer.getvalue())
    (folder / "folder.pt").mkdir()
    return {
        "scripted.pt": "TorchScript file.*qrnn-serve",
        "arrays.pt": r"not one of torch.save.*a\.npy",
        "packed.pt": "compressed entries",
        "text.pt": "starts with b'version h'",
        "empty.pt": "empty",
        "header.pt": "header of 1000000000000 bytes",
        "list.pt": "not a checkpoint of qrnn_serve.save",
        "no_weights.pt": "`state_dict` is not a mapping",
        "folder.pt": "no such file",
        "missing.pt": "no such file",
    }


def test_files_of_other_kinds_are_recognised(tmp_path):
    """TorchScript, numpy, deflated zip, text, empty, a false header, lists, folders, nothing."""
    for name, message in files_of_other_kinds(tmp_path).items():
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / name)


def test_a_saved_model_with_its_name_changed_still_loads(tmp_path):
    """The content decides the format, not the name."""
    save(SequenceModel(SMALL), tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").rename(tmp_path / "m.pt")

    assert load(tmp_path / "m.pt").config == SMALL
