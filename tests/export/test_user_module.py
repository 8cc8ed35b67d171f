"""Modules that users write around our QRNN: exported when a SequenceModel computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qrnn_export import ExportOptions, ImportHints, export
from qrnn_export.importer import import_saved
from qrnn_serve import QRNN, SequenceModel
from qrnn_serve.core.errors import AmbiguousCheckpointError, CheckpointError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from support.closeness import max_abs
from support.exported import MODELS, make_model


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1611)


class Net(nn.Module):
    """Whatever `compute` does with these layers."""

    def __init__(self, compute, *, ids=False, batch_first=False, linear=(), **options):
        super().__init__()
        self.words = nn.Embedding(9, 4) if ids else None
        self.encoder = QRNN(4, 6, 2, window=2, batch_first=batch_first, **options)
        self.linear = nn.ModuleList(nn.Linear(*sizes) for sizes in linear)
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x if self.words is None else self.words(x))


def tagger(net, x):
    return net.linear[0](net.encoder(x)[0])


def classifier(net, x):
    mean = net.encoder(x)[0].mean(1)
    return net.linear[1](net.linear[0](mean).relu()), mean


def detector(net, x):
    hidden, _ = net.encoder(x.clamp(-1, 1))
    return net.linear[0](hidden[-1].relu()).sigmoid().squeeze(-1)


def joined(net, x):
    hidden, _ = net.encoder(x)
    return net.linear[0](torch.cat([hidden[-1], hidden.amax(0), hidden.mean(0)], dim=1))


def encoder(net, x):
    return net.encoder(x)


def two_ways(net, x):
    hidden = net.encoder(x)[0]
    return net.linear[0](torch.cat([hidden[-1, :, :6], hidden[0, :, 6:]], dim=1))


KNOWN = {
    "a tagger, time-major": (Net(tagger, linear=[(6, 3)]), {"pooling": "none"}),
    "a classifier of ids, batch-major": (
        Net(classifier, ids=True, batch_first=True, linear=[(6, 5), (5, 2)]),
        {"pooling": "mean", "head_hidden_sizes": (5,), "vocabulary_size": 9},
    ),
    "a detector": (
        Net(detector, linear=[(6, 1)]),
        {
            "pooling": "last",
            "input_activation": "hardtanh",
            "pooled_activation": "relu",
            "output_activation": "sigmoid",
        },
    ),
    "joined pools": (Net(joined, linear=[(18, 2)]), {"pooling": "last_max_mean"}),
    "an encoder": (Net(encoder, zoneout=0.25), {"pooling": "none", "head_size": None}),
    "two directions": (
        Net(two_ways, linear=[(12, 2)], bidirectional=True),
        {"pooling": "last"},
    ),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_what_a_module_computes_is_found(kind):
    """The model gives the module's answers at sizes that were not compared."""
    module, expected = KNOWN[kind]

    imported = import_saved(module, ImportHints())

    config = imported.model.config
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.qrnn == module.encoder.config
    module.eval()
    ids = module.words is not None
    x = torch.randint(0, 9, (5, 31)) if ids else 3 * torch.randn(5, 31, 4)
    answer = module(x if module.encoder.batch_first else x.transpose(0, 1))
    answer = answer[0] if isinstance(answer, tuple) else answer
    if answer.dim() == 3 and not module.encoder.batch_first:
        answer = answer.transpose(0, 1)
    output = imported.model(x)[0]
    assert max_abs(answer.detach().reshape(output.shape), output) <= FLOAT32_MAX_ABS
    assert any("the only one of" in note for note in imported.notes)


def test_a_module_is_exported_and_stays_as_it_was(tmp_path):
    """Both artefacts are written and proven; training mode and gradients stay."""
    module = nn.DataParallel(Net(classifier, ids=True, batch_first=True, linear=[(6, 5), (5, 2)]))

    report = export(module.train(), tmp_path, ExportOptions())

    assert [a.path.name for a in report.artefacts] == ["model.ts.pt", "model.onnx"]
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def scaled(net, x):
    return 2 * net.linear[0](net.encoder(x)[0])


def skipped(net, x):
    return x + net.encoder(x)[0][..., :4]


def fails(net, x):
    raise ValueError("give me a dict")


def with_norm():
    net = Net(tagger, linear=[(6, 3)])
    net.norm = nn.LayerNorm(6)
    return net


def with_two():
    net = Net(tagger, linear=[(6, 3)])
    net.decoder = QRNN(4, 6)
    return net


def around_a_model():
    net = Net(tagger, linear=[(6, 3)])
    net.model = make_model(MODELS["stack one"])
    return net


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Net(scaled, linear=[(6, 3)]), r"Net: no SequenceModel with its layers gives its answers"),
        (Net(skipped), r"no SequenceModel .* Describe the model as a qrnn_serve\.SequenceModel"),
        (Net(fails, linear=[(6, 3)]), r"failed with ValueError: give me a dict"),
        (Net(tagger, linear=[(4, 3)]), r"linear\.0 reads 4 values, and the QRNN gives 6"),
        (with_norm(), r"no place for: norm\.weight, norm\.bias"),
        (with_two(), r"holds 2 QRNNs \(encoder, decoder\)"),
        (around_a_model(), r"export module\.model instead"),
    ],
    ids=["scaled", "skip", "failing", "linear first", "norm", "two", "around a model"],
)
def test_what_cannot_be_said_is_refused(module, message):
    """Each says what was found and what to do; nothing is guessed."""
    with pytest.raises(CheckpointError, match=message):
        import_saved(module, ImportHints())


def test_weights_that_hide_the_difference_are_refused():
    """With a head of zeros every way gives the same answers, so none is chosen."""
    module = Net(joined, linear=[(18, 2)])
    nn.init.zeros_(module.linear[0].weight)

    with pytest.raises(AmbiguousCheckpointError, match=r"several SequenceModels .*weights zero"):
        import_saved(module, ImportHints())


def test_flags_do_not_go_with_a_module():
    """What a flag would say is in the module."""
    with pytest.raises(CheckpointError, match="this is a module"):
        import_saved(Net(tagger, linear=[(6, 3)]), ImportHints(zoneout=0.5))


def test_a_subclass_of_our_model_is_our_model():
    """A SequenceModel is exported as it is."""
    model = make_model(MODELS["stack one"])

    assert isinstance(import_saved(model, ImportHints()).model, SequenceModel)
