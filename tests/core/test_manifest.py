"""The manifest says what an artefact is, or is refused with the reason."""

from __future__ import annotations

import json

import pytest

from qrnn_serve.core.errors import ArtefactError
from qrnn_serve.core.manifest import Manifest, StateSlice, TensorSpec

MANIFEST = Manifest(
    kind="onnx",
    config={"qrnn": {"input_size": 3, "layers": [{"hidden_size": 4}]}},
    inputs=(
        TensorSpec(name="input", dtype="float32", shape=("batch", "time", 3)),
        TensorSpec(name="state", dtype="float32", shape=("batch", 7), optional=True),
    ),
    outputs=(TensorSpec(name="output", dtype="float32", shape=("batch", "time", 4)),),
    state=(
        StateSlice(layer=0, direction="forward", kind="cell", start=0, stop=4),
        StateSlice(layer=0, direction="forward", kind="inputs", start=4, stop=7),
    ),
    weights_sha256="00ff",
    versions={"torch": "2.13.0"},
    parity={"B 3, T 5": 1e-7},
    notes=("hidden size 4 inferred from the head",),
)


def test_round_trip_keeps_every_field():
    """What was written is what is read."""
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert MANIFEST.state_size == 7


def test_equal_manifests_are_equal_bytes():
    """The order in which a mapping was filled does not show."""
    shuffled = json.loads(MANIFEST.to_json())
    again = Manifest.from_json(json.dumps(dict(reversed(shuffled.items()))))

    assert again.to_json() == MANIFEST.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "model.onnx: its manifest is not JSON"),
        ("[]", "manifest format None, this release reads 1"),
        ('{"format_version": 99}', "manifest format 99, this release reads 1"),
        ('{"format_version": 1}', r"missing keys \['config'"),
    ],
    ids=["truncated", "not an object", "from a newer release", "without its fields"],
)
def test_unreadable_manifest_says_why(text, message):
    """A damaged or newer file is named, with the reason."""
    with pytest.raises(ArtefactError, match=message):
        Manifest.from_json(text, "model.onnx")
