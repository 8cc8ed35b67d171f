"""Configuration data: nothing is ignored, nothing is guessed."""

from __future__ import annotations

import json

import pytest

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig

CONFIG = SequenceModelConfig(
    qrnn=QRNNConfig(
        input_size=3,
        layers=(LayerConfig(hidden_size=4, window=2, zoneout=0.25), LayerConfig(hidden_size=5)),
        bidirectional="stacks",
    ),
    vocabulary_size=11,
    pooling="last_max_mean",
    head_size=2,
)


def test_mapping_round_trip_through_json():
    """A configuration survives JSON unchanged."""
    assert from_mapping(SequenceModelConfig, json.loads(json.dumps(to_mapping(CONFIG)))) == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling": "median"}, r"SequenceModelConfig\.pooling: expected one of .*'median'"),
        ({"poling": "mean"}, r"unknown keys \['poling'\]"),
        ({"qrnn": {"layers": []}}, r"SequenceModelConfig\.qrnn: missing keys \['input_size'\]"),
        ({"vocabulary_size": "11"}, r"vocabulary_size: expected int, got '11'"),
        ({"vocabulary_size": True}, r"vocabulary_size: expected int, got True"),
        ({"head_size": 0}, r"head_size: expected at least 1, got 0"),
        ({"padding_id": 11}, r"padding_id: expected 0 to 10, got 11"),
        ({"ids_per_timestep": 0}, r"ids_per_timestep: expected at least 1, got 0"),
        (
            {"vocabulary_size": None, "ids_per_timestep": 2},
            r"ids_per_timestep: expected 1 for a model of features, got 2",
        ),
        ({"input_activation": "gelu"}, r"input_activation: expected one of .*'gelu'"),
        ({"output_activation": 1}, r"output_activation: expected one of .*1"),
        ({"head_hidden_sizes": [4, 0]}, r"head_hidden_sizes: expected sizes of at least 1"),
        (
            {"head_size": None, "head_hidden_sizes": [4]},
            r"head_hidden_sizes: expected none without a head_size",
        ),
        ({"qrnn": 3}, r"SequenceModelConfig\.qrnn: expected a mapping, got int"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_wrong_mapping_names_key_value_and_rule(change, message):
    """Every mistake is an error that says where it is and what was expected."""
    with pytest.raises(ConfigError, match=message):
        from_mapping(SequenceModelConfig, to_mapping(CONFIG) | change)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", 0), ("window", 0), ("zoneout", 1.5), ("zoneout", -0.1)],
)
def test_layer_config_checks_its_values(field, value):
    """A layer that cannot exist is refused by field and value."""
    with pytest.raises(ConfigError, match=f"{field}: expected .*got {value}"):
        LayerConfig(**({"hidden_size": 4} | {field: value}))


def test_layer_input_sizes_follow_the_bidirectional_rule():
    """Joined after each layer, a layer reads both directions; in two stacks, only its own."""
    layers = (LayerConfig(hidden_size=4), LayerConfig(hidden_size=5))
    widths = {
        rule: QRNNConfig(input_size=3, layers=layers, bidirectional=rule).layer_input_size(1)
        for rule in ("no", "per_layer", "stacks")
    }

    assert widths == {"no": 4, "per_layer": 8, "stacks": 4}
