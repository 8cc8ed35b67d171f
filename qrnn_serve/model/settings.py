"""From the arguments that people write to a QRNNConfig: one value for all layers, or a list."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.model.config import LayerConfig, QRNNConfig
from qrnn_serve.model.layer import QRNNLayer

Setting = TypeVar("Setting")


_BESIDE_READY_LAYERS = {
    "bias": True,
    "bidirectional": False,
    "save_prev_x": False,
    "zoneout": 0.0,
    "window": 1,
    "output_gate": True,
    "zoneout_rule": "salesforce",
    "weight_drop": 0.0,
}
"""The defaults of `QRNN`. Ready-made layers bring their own settings: other values are errors."""


def config_from_arguments(
    input_size: int | None,
    hidden_size: int | Sequence[int] | None,
    num_layers: int,
    settings: Mapping[str, Any],
) -> QRNNConfig:
    """Bring the arguments of `QRNN` into one config.

    Args:
        input_size: Width of the input.
        hidden_size: One width, or one for each layer.
        num_layers: Number of layers; 1 beside a list of widths leaves it to the list.
        settings: The other arguments by name.

    Raises:
        ConfigError: A value is missing or out of range, or a list has another length.
    """
    if input_size is None or hidden_size is None:
        raise ConfigError("input_size and hidden_size: expected both, or ready-made layers")
    if isinstance(hidden_size, Sequence) and num_layers == 1:
        num_layers = len(hidden_size)
    if num_layers < 1:
        raise ConfigError(f"num_layers: expected at least 1, got {num_layers}")
    rule = settings["bidirectional_rule"]
    if rule not in ("per_layer", "stacks"):
        raise ConfigError(f"bidirectional_rule: expected per_layer or stacks, got {rule!r}")
    if settings["bidirectional"] and settings["save_prev_x"]:
        raise ConfigError(
            "save_prev_x: a backward direction starts at the end of a sequence, so no earlier call "
            "has inputs for it; use one direction, or carry a QRNNState"
        )
    sizes = _for_each_layer("hidden_size", hidden_size, num_layers)
    windows = _for_each_layer("window", settings["window"], num_layers)
    gates = _for_each_layer("output_gate", settings["output_gate"], num_layers)
    zoneouts = _for_each_layer("zoneout", settings["zoneout"], num_layers)
    layers = tuple(
        LayerConfig(hidden_size=size, window=window, output_gate=gate, zoneout=float(zoneout))
        for size, window, gate, zoneout in zip(sizes, windows, gates, zoneouts, strict=True)
    )
    return QRNNConfig(
        input_size=input_size,
        layers=layers,
        bidirectional=rule if settings["bidirectional"] else "no",
        zoneout_rule=settings["zoneout_rule"],
        dropout=float(settings["dropout"]),
        weight_drop=float(settings["weight_drop"]),
        bias=settings["bias"],
    )


def config_from_layers(
    layers: Sequence[QRNNLayer],
    input_size: int | None,
    hidden_size: int | Sequence[int] | None,
    num_layers: int,
    settings: Mapping[str, Any],
) -> QRNNConfig:
    """The config of ready-made layers.

    Raises:
        ConfigError: They do not fit on each other, or contradict the other arguments.
    """
    for name, default in _BESIDE_READY_LAYERS.items():
        if settings[name] != default:
            raise ConfigError(
                f"{name}: ready-made layers bring their own settings and run in one direction; got "
                f"{name}={settings[name]!r} beside `layers`"
            )
    if not layers:
        raise ConfigError("layers: expected at least one layer, got none")
    first = layers[0]
    if input_size not in (None, first.input_size):
        raise ConfigError(f"input_size: got {input_size}, but layers[0] has {first.input_size}")
    if num_layers not in (1, len(layers)):
        raise ConfigError(f"num_layers: got {num_layers}, but there are {len(layers)} layers")
    sizes = [layer.hidden_size for layer in layers]
    if (
        hidden_size is not None
        and _for_each_layer("hidden_size", hidden_size, len(layers)) != sizes
    ):
        raise ConfigError(f"hidden_size: got {hidden_size}, but the layers have {sizes}")
    width = first.input_size
    for number, layer in enumerate(layers):
        if layer.input_size != width:
            raise ConfigError(
                f"layers[{number}]: its input_size is {layer.input_size}, but it gets {width}"
            )
        width = layer.hidden_size
        if layer.reverse:
            raise ConfigError(f"layers[{number}]: a reverse layer needs bidirectional=True instead")
        if _shared_settings(layer) != _shared_settings(first):
            raise ConfigError(
                f"layers[{number}]: zoneout_rule, weight_drop and bias must be those of layers[0]"
            )
    return QRNNConfig(
        input_size=first.input_size,
        layers=tuple(layer.layer_config for layer in layers),
        zoneout_rule=first.zoneout_rule,
        dropout=float(settings["dropout"]),
        weight_drop=first.weight_drop,
        bias=first.has_bias,
    )


def _shared_settings(layer: QRNNLayer) -> tuple[str, float, bool]:
    return layer.zoneout_rule, layer.weight_drop, layer.has_bias


def _for_each_layer(name: str, value: Setting | Sequence[Setting], layers: int) -> list[Setting]:
    if not isinstance(value, Sequence):
        return [value] * layers
    if len(value) != layers:
        raise ConfigError(
            f"{name}: expected one value for each of {layers} layers, got {len(value)}"
        )
    return list(value)
