"""Files and objects that hold a model: safe forms load, pickles and damaged files are refused."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import safetensors.torch
import torch

from qrnn_export.importer import import_file, import_saved
from qrnn_export.options import ImportHints
from qrnn_serve import QRNN, save
from qrnn_serve.core.errors import CheckpointError, UntrustedFileError
from support.closeness import max_abs
from support.exported import MODELS, make_model

GOLDEN = Path(__file__).parents[1] / "golden"
FACTS = ImportHints(hidden_size=(4,), window=(1,), zoneout=0.0)


@pytest.fixture
def stack():
    return QRNN(5, 4).eval()


def load(path, hints=FACTS, *, trust=False):
    return import_file(path, hints, trust_pickle=trust)


def same_numbers(imported, stack):
    x = torch.randn(6, 2, 5)
    return max_abs(imported.model(x.transpose(0, 1))[0].transpose(0, 1), stack(x)[0].detach()) == 0


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_our_own_checkpoint_needs_no_flags(suffix, tmp_path):
    """A file of qrnn_serve.save gives the same model, whole configuration included."""
    model = make_model(MODELS["ids, every pooling, head"])
    save(model, tmp_path / f"model{suffix}")

    imported = load(tmp_path / f"model{suffix}", ImportHints())

    assert imported.model.config == model.config
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(imported.model(ids)[0], model(ids)[0])


def test_our_own_checkpoint_refuses_flags_for_foreign_ones(tmp_path):
    """A flag that would be ignored is an error."""
    save(make_model(MODELS["stack one"]), tmp_path / "model.pt")

    with pytest.raises(CheckpointError, match="holds its whole configuration"):
        load(tmp_path / "model.pt", ImportHints(zoneout=0.3))


FORMS = {
    "state dict": lambda w: w,
    "under state_dict": lambda w: {"state_dict": w, "epoch": 3, "optimizer": {"lr": 0.1}},
    "under model": lambda w: {"model": w, "opt": {"state": {}}},
    "under net": lambda w: {"net": w},
    "in a list": lambda w: [w, {"lr": 0.1}],
    "DataParallel": lambda w: {f"module.{k}": t for k, t in w.items()},
    "DataParallel, nested": lambda w: {"model": {f"module.{k}": t for k, t in w.items()}},
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("form", FORMS)
def test_every_safe_form_loads(form, zipped, stack, tmp_path):
    """State dicts load without a pickle, however they are wrapped, from new and old files."""
    saved = FORMS[form](dict(stack.state_dict()))
    torch.save(saved, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)

    assert same_numbers(load(tmp_path / "old.pt"), stack)


def test_foreign_safetensors_load(stack, tmp_path):
    """A state dict as safetensors is read as one."""
    safetensors.torch.save_file(stack.state_dict(), tmp_path / "old.safetensors")

    assert same_numbers(load(tmp_path / "old.safetensors"), stack)


def test_prefix_is_taken_off_only_when_every_name_has_it(stack):
    """`module.` before some names is not DataParallel's."""
    weights = dict(stack.state_dict())
    weights["module.layers.0.linear.bias"] = weights.pop("layers.0.linear.bias")

    with pytest.raises(CheckpointError, match="no layout that is known"):
        import_saved(weights, FACTS)


@pytest.mark.parametrize("name", ["pickled_module.pt", "pickled_list.pt"])
def test_pickles_are_refused_with_risk_classes_and_flag(name):
    """A file of Python objects is not opened; the message says why and what allows it."""
    path = GOLDEN / "checkpoints/awd_lstm_lm" / name

    with pytest.raises(UntrustedFileError) as caught:
        load(path)

    message = str(caught.value)
    for part in ("runs whatever code", "--trust-pickle", "model.RNNModel", "state_dict()"):
        assert part in message


def test_trusted_pickles_name_all_missing_modules():
    """With the flag, what is missing to unpickle is listed at once."""
    path = GOLDEN / "checkpoints/awd_lstm_lm/pickled_list.pt"

    with pytest.raises(
        CheckpointError, match=r"locked_dropout, .*splitcross, torchqrnn, weight_drop"
    ):
        load(path, trust=True)


class OldLayer(torch.nn.Module):
    """Like torchqrnn's: what a state dict lacks is in its attributes."""

    def __init__(self, inputs, hidden, window, zoneout):
        super().__init__()
        self.hidden_size, self.window, self.zoneout = hidden, window, zoneout
        self.prevX = torch.zeros(1, 9, inputs)
        self.linear = torch.nn.Linear(window * inputs, 3 * hidden)


class OldStack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([OldLayer(5, 4, 2, 0.25), OldLayer(4, 6, 1, 0.25)])


@pytest.fixture
def old_module(monkeypatch):
    """The classes under an importable name, as in a user's project."""
    home = types.ModuleType("old_project")
    for cls in (OldLayer, OldStack):
        monkeypatch.setattr(cls, "__module__", "old_project")
        setattr(home, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "old_project", home)
    return OldStack()


@pytest.mark.parametrize("wrapped", ["module", "list", "DataParallel", "DataParallel inside"])
def test_trusted_pickle_gives_its_single_module(wrapped, old_module, tmp_path):
    """Module, list and wrappers at any depth are opened; sizes and zoneout come from the layers."""
    saved = {
        "module": lambda m: m,
        "list": lambda m: [m, torch.nn.CrossEntropyLoss(), {"lr": 0.1}],
        "DataParallel": torch.nn.DataParallel,
        "DataParallel inside": lambda m: [wrap_layers(m)],
    }[wrapped](old_module)
    torch.save(saved, tmp_path / "old.pt")

    imported = load(tmp_path / "old.pt", ImportHints(), trust=True)

    layers = imported.model.config.qrnn.layers
    assert [(x.hidden_size, x.window, x.zoneout) for x in layers] == [(4, 2, 0.25), (6, 1, 0.25)]
    assert any("taken off" in note for note in imported.notes) == wrapped.startswith("DataParallel")


class Learner:
    """An object around a module, as a training library pickles it."""

    def __init__(self, model):
        self.model = model


def test_the_model_of_a_trusted_object_is_taken(old_module):
    """An object that holds its module as `model` is opened, with a note."""
    imported = import_saved(Learner(old_module), ImportHints())

    assert [layer.hidden_size for layer in imported.model.config.qrnn.layers] == [4, 6]
    assert any("attribute 'model' of Learner" in note for note in imported.notes)


def test_zoneout_of_a_fastai_class_does_nothing(old_module, monkeypatch):
    """The class of the layers says which rule their zoneout follows."""
    monkeypatch.setattr(OldLayer, "__module__", "fastai.text.models.qrnn")

    assert import_saved(old_module, ImportHints()).model.config.qrnn.zoneout_rule == "fastai"


def test_a_module_of_two_directions_gives_each_size_once(old_module):
    """The layers of the backward direction do not count as more layers."""
    old_module.layers_bwd = torch.nn.ModuleList([OldLayer(5, 4, 2, 0.25), OldLayer(4, 6, 1, 0.25)])

    config = import_saved(old_module, ImportHints(bidirectional="stacks")).model.config.qrnn

    assert [(layer.hidden_size, layer.window) for layer in config.layers] == [(4, 2), (6, 1)]


def wrap_layers(module):
    module.layers[1] = torch.nn.DataParallel(module.layers[1])
    return module


def test_a_module_is_not_changed_by_an_export_of_it():
    """A live module in training mode, with a wrapper inside, stays as it is."""
    module = torch.nn.DataParallel(QRNN(5, 4).train())

    imported = import_saved(module, ImportHints())

    assert module.training
    assert module.module.training
    assert not imported.model.training
    assert all(p.requires_grad for p in module.parameters())


def damaged(path, tmp_path, content=None, keep=None):
    target = tmp_path / path
    target.write_bytes(content if content is not None else b"")
    if keep is not None:
        target.write_bytes(target.read_bytes()[:keep])
    return target


def torch_bytes(tmp_path, *, zipped=True):
    torch.save(
        dict(QRNN(5, 4).state_dict()), tmp_path / "whole", _use_new_zipfile_serialization=zipped
    )
    return (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("keep", [10, 300, -1, -30])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_cut_files_are_refused(keep, zipped, tmp_path):
    """A file cut at any place says that it is damaged."""
    whole = torch_bytes(tmp_path, zipped=zipped)
    path = damaged("cut.pt", tmp_path, whole[:keep])

    with pytest.raises(CheckpointError, match="cut off or damaged"):
        load(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.pt", b"", "the file is empty"),
        ("text.pt", b"epoch,loss\n1,0.5\n", "expected a torch checkpoint"),
        ("model.onnx", b"\x08\x09\x12\x0bqrnn-export", "output of this command"),
        ("cut.safetensors", b"\xff\x00\x00\x00\x00\x00\x00\x00{", "safetensors file is cut off"),
        ("junk.safetensors", b"no header at all", "safetensors file is cut off"),
        ("pickle.pt", b"\x80\x04K\x01.", "not a torch checkpoint"),
    ],
)
def test_other_files_are_refused(name, content, message, tmp_path):
    """Each says what was expected and what came."""
    with pytest.raises(CheckpointError, match=message):
        load(damaged(name, tmp_path, content))


def test_missing_files_and_folders_are_refused(tmp_path):
    """A path that is no file says so."""
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path / "nothing.pt")
    with pytest.raises(CheckpointError, match="this is a folder"):
        load(tmp_path)


def test_a_torchscript_file_is_refused(tmp_path):
    """An artefact is not taken for a checkpoint."""
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "model.ts.pt")

    with pytest.raises(CheckpointError, match="this is a TorchScript file"):
        load(tmp_path / "model.ts.pt")


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (torch.zeros(3), "expected a module, a state dict"),
        ({"loss": 0.1, "epoch": 3}, "none of them"),
        ({"model": {}, "net": {}}, r"\['model', 'net'\]"),
        ([1, 2], "expected one model in the list, found 0"),
        ([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], "found 2"),
    ],
    ids=["tensor", "no model", "two models", "numbers", "two state dicts"],
)
def test_objects_without_one_model_are_refused(saved, message):
    """None or more than one model in a file is an error that lists what there is."""
    with pytest.raises(CheckpointError, match=message):
        import_saved(saved, FACTS)
