"""Tables of the operators: pool, backward, scans. Shares of copy bandwidth, and other scans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_cases import (
    FLOOR_ELEMENTS,
    SAVED_STATE_ELEMENTS,
    Case,
    draw_lengths,
    pool_target,
)
from kernel_peers import difference, expected_scan, scan_peers
from kernel_timing import COPY_BYTES, Bench, Call, Measured, Work, ratio, short_error
from qrnn_serve.kernels import fo_pool, forget_mult

Cell = dict[str, Any]
LENGTHS_SEED = 1611


def measure_pool(case: Case, bench: Bench) -> Cell:
    """The share of copy bandwidth that fo_pool reaches."""
    offsets = _offsets(case, bench.device)
    calls: list[Call] = [
        partial(fo_pool, _draw(case, bench.device, 3), offsets=offsets, reverse=case.reverse)
        for _ in range(_sets(case, bench))
    ]
    with torch.no_grad():
        measured = bench.measure({case.op: Work(calls), "copy": bench.copy_work()})
    return _share_cell(case, measured)


def measure_backward(case: Case, bench: Bench) -> Cell:
    """The share of copy bandwidth of a backward, or of forget_mult's forward."""
    offsets = _offsets(case, bench.device)
    make = {
        "fo_pool_backward": _fo_pool_backward,
        "forget_mult": _forget_mult,
        "forget_mult_backward": _forget_mult_backward,
    }[case.op]
    calls = [make(case, bench.device, offsets) for _ in range(_sets(case, bench))]
    measured = bench.measure({case.op: Work(calls), "copy": bench.copy_work()})
    return _share_cell(case, measured)


def measure_scans(case: Case, bench: Bench) -> Cell:
    """How many times longer other scans of the same recurrence take. Wrong ones are not timed."""
    draws = [_scan_inputs(case, bench.device) for _ in range(_sets(case, bench))]
    works = {"ours": Work([partial(forget_mult, f, x) for f, x in draws])}
    errors: dict[str, str] = {}
    expected, part = expected_scan(*draws[0])
    for name, peer in scan_peers().items():
        inputs = [(_time_last(f), _time_last(x)) for f, x in draws] if peer.time_last else draws
        try:
            with torch.no_grad():
                h = peer.run(*inputs[0])
            wrong = difference(part(h.permute(2, 0, 1) if peer.time_last else h), expected)
        except Exception as error:  # a peer may fail in any way; the cell says how
            wrong = short_error(error)
        if wrong:
            errors[name] = wrong
        else:
            works[name] = Work([partial(peer.run, f, x) for f, x in inputs])
    with torch.no_grad():
        measured = bench.measure(works)
    measured.errors.update(errors)
    return _scan_cell(measured)


def _scan_cell(measured: Measured) -> Cell:
    ours = measured.us("ours")
    ratios = {
        name: ratio(timing.median_us, ours)
        for name, timing in measured.times.items()
        if name != "ours"
    }
    known = {name: value for name, value in ratios.items() if value is not None}
    nearest = min(known, key=known.__getitem__, default=None)
    worst = known[nearest] if nearest else None
    return measured.as_cell() | {
        "ratios": ratios,
        "nearest": nearest,
        "ratio": worst,
        "target": 1.0,
        "met": None if worst is None else worst >= 1.0,
        "headline": f"{_us(ours)}, nearest other {nearest} x{worst or 0:.2f}",
    }


def _share_cell(case: Case, measured: Measured) -> Cell:
    copy_us, op_us = measured.us("copy"), measured.us(case.op)
    copy_rate = ratio(2 * COPY_BYTES, copy_us)

    def share(elements: int) -> float | None:
        return ratio(ratio(case.traffic_bytes(elements), op_us), copy_rate)

    floor = FLOOR_ELEMENTS[case.op]
    saved = SAVED_STATE_ELEMENTS.get(case.op)
    target = pool_target(case.shape, case.dtype)
    reached = share(floor)
    return measured.as_cell() | {
        "bytes": case.traffic_bytes(floor),
        "copy_gb_per_s": None if copy_rate is None else copy_rate / 1e3,
        "share": reached,
        "share_with_saved_states": None if saved is None else share(saved),
        "target": target,
        "met": None if target is None or reached is None else reached >= target,
        "headline": f"{_us(op_us)}, {100 * (reached or 0):.0f} % of copy",
    }


def _fo_pool_backward(case: Case, device: str, offsets: Tensor | None) -> Call:
    gates = _draw(case, device, 3).requires_grad_()
    h = fo_pool(gates, offsets=offsets)[0]
    grad_h = torch.randn_like(h)
    return lambda: torch.autograd.grad(h, gates, grad_h, retain_graph=True)


def _forget_mult(case: Case, device: str, offsets: Tensor | None) -> Call:
    f, x = _scan_inputs(case, device)
    return partial(forget_mult, f, x, offsets=offsets)


def _forget_mult_backward(case: Case, device: str, offsets: Tensor | None) -> Call:
    f, x = (tensor.requires_grad_() for tensor in _scan_inputs(case, device))
    h = forget_mult(f, x, offsets=offsets)
    grad_h = torch.randn_like(h)
    return lambda: torch.autograd.grad(h, (f, x), grad_h, retain_graph=True)


def _draw(case: Case, device: str, gates: int) -> Tensor:
    timesteps, batch, hidden = case.shape
    leading = (timesteps * batch,) if case.packed else (timesteps, batch)
    return torch.randn(*leading, gates * hidden, device=device, dtype=getattr(torch, case.dtype))


def _scan_inputs(case: Case, device: str) -> tuple[Tensor, Tensor]:
    return _draw(case, device, 1).sigmoid_(), _draw(case, device, 1)


def _time_last(tensor: Tensor) -> Tensor:
    return tensor.permute(1, 2, 0).contiguous()


def _offsets(case: Case, device: str) -> Tensor | None:
    if not case.packed:
        return None
    lengths = draw_lengths(case.shape.batch, case.shape.timesteps, LENGTHS_SEED)
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def _sets(case: Case, bench: Bench) -> int:
    return bench.sets_for(case.traffic_bytes(FLOOR_ELEMENTS[case.op]))


def _us(time_us: float | None) -> str:
    return "failed" if time_us is None else f"{time_us:,.1f} us"


MEASURES: dict[str, Callable[[Case, Bench], Cell]] = {
    "pool": measure_pool,
    "backward": measure_backward,
    "scans": measure_scans,
}
