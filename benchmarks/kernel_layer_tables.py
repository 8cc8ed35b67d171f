"""Tables of layers: against cuDNN's LSTM, the original computation, an empty graph, two kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_cases import (
    BESIDE_PRODUCT_TARGET,
    FUSED_TARGET,
    LAUNCH_BOUND_TARGET,
    PAPER_FACTORS,
    SMALL_FACTOR,
    Case,
    paper_speedup,
)
from kernel_peers import OriginalLayer, empty_kernel, shifted_columns, stepwise_difference
from kernel_timing import Bench, Call, Measured, Work, ratio
from qrnn_serve import QRNN, QRNNLayer
from qrnn_serve.kernels import fo_pool
from qrnn_serve.kernels.ops import linear_fo_pool

Cell = dict[str, Any]
MODES = ("graph", "eager")
GRAPH_WAYS = {"alone": 1, "queued": 1, "in a row": 32}
"""Calls in a graph."""


def measure_lstm(case: Case, bench: Bench) -> Cell:
    """One layer against one layer of cuDNN's LSTM: its fastest of eager and captured.

    `ratio_product` is the LSTM over our matrix product alone: what no kernel beside it can pass.
    """
    hidden = case.shape.hidden
    options = {"device": bench.device, "dtype": getattr(torch, case.dtype)}
    ours = QRNN(hidden, hidden, **options).eval()
    lstm = nn.LSTM(hidden, hidden, **options).eval()
    lstm.flatten_parameters()
    values = torch.randn(*case.shape, **options)
    sides = {"ours": partial(ours, values), "lstm": partial(lstm, values)}
    linear = ours.layers[0].linear
    product = Work([partial(F.linear, values, linear.weight, linear.bias)])
    with torch.no_grad():
        measured = bench.measure(_in_both_modes(sides) | {"product graph": product})
    lstm_us = [us for us in (measured.us(f"lstm {mode}") for mode in MODES) if us is not None]
    best_lstm = min(lstm_us, default=None)
    reached = ratio(best_lstm, measured.us("ours graph"))
    paper = paper_speedup(case.shape)
    target = PAPER_FACTORS[case.dtype] * paper
    return measured.as_cell() | {
        "ratio": reached,
        "ratio_eager": ratio(measured.us("lstm eager"), measured.us("ours eager")),
        "ratio_product": ratio(best_lstm, measured.us("product graph")),
        "paper": paper,
        "target": target,
        "met": None if reached is None else reached >= target,
        "headline": f"x{reached or 0:.1f} (paper {paper}, target {target:.1f})",
    }


def measure_salesforce(case: Case, bench: Bench) -> Cell:
    """Layers against the original computation: whole, and without their matrix products."""
    options = {"device": bench.device, "dtype": getattr(torch, case.dtype)}
    hidden = case.shape.hidden
    ours = QRNN(hidden, hidden, len(case.windows), window=case.windows, **options)
    layers = [layer.linear for layer in ours.layers]
    original = nn.Sequential(*map(OriginalLayer, layers, case.windows))
    values = torch.randn(*case.shape, **options)
    columns = [shifted_columns(values, window) for window in case.windows]
    with torch.no_grad():
        wrong = stepwise_difference(original(values), ours(values)[0])

    def products(inputs: list[Tensor]) -> list[Tensor]:
        pairs = zip(layers, inputs, strict=True)
        return [F.linear(columns, layer.weight, layer.bias) for layer, columns in pairs]

    sides: dict[str, Call] = {
        "ours": _call(case, lambda inputs: [ours(inputs[0])[0]], [values], ours),
        "original": _call(case, lambda inputs: [original(inputs[0])], [values], ours),
        "product": _call(case, products, columns, ours),
    }
    if wrong:
        del sides["original"]
    with torch.set_grad_enabled(case.training):
        measured = bench.measure(_in_both_modes(sides))
    if wrong:
        measured.errors["original"] = wrong
    return _salesforce_cell(measured)


def measure_graph(case: Case, bench: Bench) -> Cell:
    """A small layer, or pool, beside a graph of two empty kernels.

    "alone" is one replay between two events, with the host's time to launch it; "queued" is the
    same launched while the device is busy; "in a row" is a share of one graph that holds many.
    """
    options = {"device": bench.device, "dtype": getattr(torch, case.dtype)}
    timesteps, batch, hidden = case.shape
    if case.op == "layer":
        module = QRNN(hidden, hidden, **options).eval()
        values = torch.randn(*case.shape, **options)
        ours = partial(module, values)
    else:
        gates = torch.randn(timesteps, batch, 3 * hidden, **options)
        ours = partial(fo_pool, gates)
    works = {
        f"{name} {way}": Work([call], calls_per_sample=calls, queued=way == "queued")
        for way, calls in GRAPH_WAYS.items()
        for name, call in (("ours", ours), ("empty pair", _empty_pair))
    }
    with torch.no_grad():
        measured = bench.measure(works)
    ratios = {
        way: ratio(measured.us(f"ours {way}"), measured.us(f"empty pair {way}"))
        for way in GRAPH_WAYS
    }
    alone = ratios["alone"]
    return measured.as_cell() | {
        "ratios": ratios,
        "ratio": alone,
        "target": SMALL_FACTOR,
        "met": None if alone is None else alone <= SMALL_FACTOR,
        "headline": "of an empty pair: "
        + ", ".join(f"{way} x{value or 0:.2f}" for way, value in ratios.items()),
    }


def measure_fused(case: Case, bench: Bench) -> Cell:
    """A layer as one kernel and as two, captured, and which of them the layer chooses."""
    hidden = case.shape.hidden
    options = {"device": bench.device, "dtype": getattr(torch, case.dtype)}
    layer = QRNNLayer(hidden, hidden, **options).eval().requires_grad_(False)
    weight, bias = layer.linear.weight, layer.linear.bias
    values = torch.randn(*case.shape, **options)
    c0 = torch.zeros(case.shape.batch, hidden, **options)
    calls: dict[str, Call] = {
        "product": partial(F.linear, values, weight, bias),
        "two kernels": lambda: fo_pool(F.linear(values, weight, bias), c0),
        "one kernel": partial(linear_fo_pool, values, weight, bias, c0),
    }
    choice = layer.kernels(values, None, c0)
    with torch.no_grad():
        measured = bench.measure({name: Work([call]) for name, call in calls.items()})
    reached = ratio(measured.us("two kernels"), measured.us("one kernel"))
    uses_one = choice.plan is not None
    used = "one" if uses_one else "two"
    return measured.as_cell() | {
        "ratio": reached,
        "chosen": str(choice),
        "uses_one": uses_one,
        "target": FUSED_TARGET,
        "met": None if reached is None else reached >= FUSED_TARGET or not uses_one,
        "headline": f"one kernel x{reached or 0:.2f}, the layer uses {used}",
    }


def _salesforce_cell(measured: Measured) -> Cell:
    cell = measured.as_cell()
    for mode in MODES:
        ours, original, product = (
            measured.us(f"{side} {mode}") for side in ("ours", "original", "product")
        )
        cell[f"ratio_{mode}"] = ratio(original, ours)
        cell[f"beside_product_{mode}"] = beside_product(original, ours, product)
    original_us = measured.us("original eager")
    cell["ratio_product"] = ratio(measured.us("original graph"), measured.us("product graph"))
    cell["ratio_as_used"] = ratio(original_us, measured.us("ours graph"))
    cell["product_share_of_original"] = ratio(measured.us("product graph"), original_us)
    cell["ratio"] = cell["ratio_graph"]
    cell["target"] = BESIDE_PRODUCT_TARGET
    cell["met"] = _salesforce_met(cell)
    beside = cell["beside_product_graph"]
    cell["headline"] = (
        f"layer x{cell['ratio'] or 0:.2f}, eager x{cell['ratio_eager'] or 0:.2f}, "
        f"beside the product x{beside or 0:.1f}"
    )
    return cell


def beside_product(
    original_us: float | None, ours_us: float | None, product_us: float | None
) -> float | None:
    """How many times faster ours is in everything beside the matrix product.

    The product is timed alone. Where ours takes hardly longer than that, one percent of it stands
    for what is left, since less than that is not measured: the result is then a lower bound.
    """
    if original_us is None or ours_us is None or product_us is None:
        return None
    return (original_us - product_us) / max(ours_us - product_us, 0.01 * product_us)


def _salesforce_met(cell: Cell) -> bool | None:
    names = ("beside_product_graph", "ratio_graph", "ratio_eager", "ratio_as_used")
    if any(cell[name] is None for name in names):
        return None
    bound_by_product = cell["product_share_of_original"] >= 0.5
    return (
        cell["beside_product_graph"] >= BESIDE_PRODUCT_TARGET
        and min(cell["ratio_graph"], cell["ratio_eager"]) >= 1.0
        and (bound_by_product or cell["ratio_as_used"] >= LAUNCH_BOUND_TARGET)
    )


def _call(
    case: Case,
    run: Callable[[list[Tensor]], list[Tensor]],
    inputs: list[Tensor],
    module: nn.Module,
) -> Call:
    """Forward, or with `case.training` forward and the gradients of inputs and weights."""
    if not case.training:
        return partial(run, inputs)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    with torch.no_grad():
        grads = [torch.randn_like(output) for output in run(inputs)]
    wanted = [*leaves, *module.parameters()]
    return lambda: torch.autograd.grad(run(leaves), wanted, grads)


def _in_both_modes(sides: dict[str, Call]) -> dict[str, Work]:
    return {
        f"{name} {mode}": Work([call], graph=mode == "graph")
        for name, call in sides.items()
        for mode in MODES
    }


def _empty_pair() -> None:
    empty_kernel()
    empty_kernel()


MEASURES: dict[str, Callable[[Case, Bench], Cell]] = {
    "lstm": measure_lstm,
    "salesforce": measure_salesforce,
    "graph": measure_graph,
    "fused": measure_fused,
}
