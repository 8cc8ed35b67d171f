"""The whole QRNN as plain float64 loops over timesteps in numpy: what the module is compared with.

Written from the equations (Bradbury et al. 2016, section 2), with none of the module's functions.
"""

from __future__ import annotations

import numpy as np
import torch

from qrnn_serve.model.config import QRNNConfig


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def loop_layer(steps, weight, bias, layer, before, *, reverse=False, zoneout=0.0):
    """One row through one layer in one direction.

    Args:
        steps: Inputs, a list of T arrays [I].
        weight: [G * H, window * I].
        bias: [G * H] or None.
        layer: LayerConfig.
        before: (cell [H], previous inputs [window - 1, I], oldest first).
        reverse: From the last timestep to the first.
        zoneout: What f is scaled down by.

    Returns:
        Outputs as a list of T arrays [H], and (cell, previous inputs) after the last timestep.
    """
    cell, previous = before
    H = layer.hidden_size
    seen = list(previous)
    outputs = []
    for x in reversed(steps) if reverse else steps:
        columns = np.concatenate([x, *seen[::-1]])
        gates = weight @ columns + (0 if bias is None else bias)
        z, f = np.tanh(gates[:H]), sigmoid(gates[H : 2 * H]) * (1 - zoneout)
        cell = f * z + (1 - f) * cell
        outputs.append(sigmoid(gates[2 * H :]) * cell if layer.output_gate else cell)
        seen = [*seen, x][1:]
    return outputs[::-1] if reverse else outputs, (cell, np.array(seen).reshape(previous.shape))


def loop_stack(config: QRNNConfig, weights, row, before=None):
    """One row through a stack, evaluating.

    Args:
        config: The stack.
        weights: State dict of a QRNN as float64 arrays.
        row: [T, I].
        before: What the last call returned, or None for zeros.

    Returns:
        Output [T, D * H], and a dict (layer, direction) -> (cell, previous inputs).
    """
    after = {}

    def run(number, direction, steps):
        layer = config.layers[number]
        width = config.layer_input_size(number)
        zeros = (np.zeros(layer.hidden_size), np.zeros((layer.window - 1, width)))
        name = f"layers{'_bwd' if direction else ''}.{number}.linear"
        outputs, after[number, direction] = loop_layer(
            steps,
            weights[f"{name}.weight"],
            weights.get(f"{name}.bias"),
            layer,
            before[number, direction] if before else zeros,
            reverse=bool(direction),
            zoneout=layer.zoneout if config.zoneout_rule == "salesforce" else 0.0,
        )
        return outputs

    numbers = range(len(config.layers))
    ahead = back = list(np.asarray(row))
    for number in numbers:
        if config.bidirectional == "per_layer":
            both = [run(number, direction, ahead) for direction in (0, 1)]
            ahead = [np.concatenate(pair) for pair in zip(*both, strict=True)]
        else:
            ahead = run(number, 0, ahead)
    if config.bidirectional == "stacks":
        for number in numbers:
            back = run(number, 1, back)
        ahead = [np.concatenate(pair) for pair in zip(ahead, back, strict=True)]
    return np.array(ahead).reshape(len(row), config.output_size), after


def weights_of(module):
    """The state dict as float64 arrays."""
    return {name: tensor.detach().double().numpy() for name, tensor in module.state_dict().items()}


def state_row(config: QRNNConfig, after):
    """The loop's state of one row as the columns of the state tensor [S]."""
    parts = []
    for number in range(len(config.layers)):
        for direction in range(config.num_directions):
            cell, previous = after[number, direction]
            parts += [cell, previous.reshape(-1)]
    return torch.from_numpy(np.concatenate(parts))
