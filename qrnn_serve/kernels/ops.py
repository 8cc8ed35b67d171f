"""The operators qrnn::forget_mult and qrnn::fo_pool: schemas, shapes, gradients, functions.

Importing this module makes them known to eager torch, autograd, torch.compile, torch.export and
TorchScript. The implementation is chosen by the device of the tensors, never by what the machine
has: CPU tensors run the C library, CUDA tensors the CUDA kernels. The maths stands in `reference`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qrnn_serve.core.errors import InputError, KernelError
from qrnn_serve.kernels import checks, cpu, cuda, cuda_layer
from qrnn_serve.kernels.checks import PoolSizes
from qrnn_serve.kernels.plan import compute_dtype, starts_shape
from qrnn_serve.kernels.straight import goes_straight


def _new_library() -> torch.library.Library:
    try:
        return torch.library.Library("qrnn", "DEF")
    except RuntimeError as error:
        raise KernelError(
            "this process has operators qrnn::* already, from a library of `qrnn-export "
            "ops-library`, which are for inference in other programs. In Python, do not load it: "
            "`import qrnn_serve.kernels` registers all operators"
        ) from error


_LIBRARY = _new_library()
_LIBRARY.define(
    "forget_mult(Tensor f, Tensor x, Tensor? h0=None, Tensor? offsets=None, bool reverse=False)"
    " -> Tensor"
)
_LIBRARY.define(
    "forget_mult_backward(Tensor grad_h, Tensor f, Tensor x, Tensor h, Tensor? h0, Tensor? offsets,"
    " bool reverse) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "fo_pool(Tensor gates, Tensor? c0=None, Tensor? offsets=None, bool output_gate=True,"
    " bool reverse=False, float zoneout=0.0) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "linear_fo_pool(Tensor x, Tensor weight, Tensor? bias=None, Tensor? c0=None,"
    " Tensor? offsets=None, Tensor? previous=None, bool reverse=False, float zoneout=0.0,"
    " int longest=0) -> (Tensor, Tensor)"
)
# What fo_pool is where gradients are needed: also `starts`, the states from which its backward
# computes the others again; empty on a CPU, which needs none.
_LIBRARY.define(
    "fo_pool_training(Tensor gates, Tensor? c0, Tensor? offsets, bool output_gate, bool reverse,"
    " float zoneout) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "fo_pool_backward(Tensor? grad_h, Tensor? grad_c, Tensor gates, Tensor? c0, Tensor? offsets,"
    " bool output_gate, bool reverse, float zoneout, Tensor? starts=None) -> (Tensor, Tensor)"
)


def forget_mult(
    f: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    offsets: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    """h_t = f_t * x_t + (1 - f_t) * h_{t-1} over every sequence; see `reference.forget_mult`.

    Args:
        f: Forget gate, [T, B, H], or packed [N, H] with `offsets`. float32, float16, bfloat16 (both
            computed in float32) or float64; any strides.
        x: New values, with the shape, dtype and device of `f`.
        h0: State before the first timestep, [B, H]; None is zeros.
        offsets: [B + 1] int32 or int64 on the same device, from 0 to N. On a GPU their values
            cannot be checked without stopping the stream: a sequence with wrong offsets gives NaN.
        reverse: Run each sequence from its last timestep to its first.

    Returns:
        h, shaped and typed as `f`, contiguous. Differentiable once in f, x and h0.

    Raises:
        DTypeError: An integer or unsupported dtype, or dtypes that differ.
        InputError: Ranks, sizes, devices or offsets that do not fit together.
        KernelError: No kernel can run on the device; the message says what to install.
    """
    return torch.ops.qrnn.forget_mult.default(f, x, h0, offsets, reverse)


def fo_pool(
    gates: Tensor,
    c0: Tensor | None = None,
    offsets: Tensor | None = None,
    output_gate: bool = True,
    reverse: bool = False,
    zoneout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Activations, recurrence and output gate in one pass; see `reference.fo_pool`.

    Args:
        gates: Pre-activations in the order Z, F, O (or Z, F), [T, B, G*H], or packed [N, G*H].
            float32, float16, bfloat16 (both computed in float32) or float64; any strides. Not
            changed.
        c0: Cell state before the first timestep, [B, H]; None is zeros.
        offsets: As in `forget_mult`.
        output_gate: True for G = 3 (fo-pooling), False for G = 2 (f-pooling).
        reverse: Run each sequence from its last timestep to its first.
        zoneout: Share by which f is scaled down, 0 to 1 (the salesforce rule at evaluation).

    Returns:
        h, [T, B, H] or [N, H], and c, [B, H], the cell state after the last timestep in running
        order (c0 for an empty sequence). Both contiguous; differentiable once in gates and c0.

    Raises:
        DTypeError: An integer or unsupported dtype, or dtypes that differ.
        InputError: Ranks, sizes, devices, offsets or zoneout that do not fit.
        KernelError: No kernel can run on the device; the message says what to install.
    """
    arguments = (gates, c0, offsets, output_gate, reverse, zoneout)
    if not goes_straight(gates, c0, offsets):
        return torch.ops.qrnn.fo_pool.default(*arguments)
    if _wants_gradients(gates, c0):
        return _FoPool.apply(*arguments)
    return _IMPLEMENTATIONS["fo_pool", gates.device.type](*arguments)


def linear_fo_pool(  # noqa: PLR0913, PLR0917  (the arguments of a product and of a pool)
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    c0: Tensor | None = None,
    offsets: Tensor | None = None,
    previous: Tensor | None = None,
    reverse: bool = False,
    zoneout: float = 0.0,
    longest: int = 0,
) -> tuple[Tensor, Tensor]:
    """Window, matrix product and `fo_pool` in one kernel, for inference on Hopper GPUs.

    Pre-activations stay in float32, so the result is nearer to the float64 reference than that of
    two kernels, which round them. `cuda_layer.choose` says where one kernel is faster.

    Args:
        x: Inputs, [T, B, I], or packed [N, I] with `offsets`. float16 or bfloat16, on a GPU of
            compute capability 9.0; I a multiple of 8.
        weight: [3*H, window*I]: rows Z, F and O; columns the current input, then that 1 step
            back, ... in running order. At most 384 columns.
        bias: [3*H]; None is zeros.
        c0: Cell state before the first timestep, [B, H]; None is zeros.
        offsets: As in `forget_mult`.
        previous: The window - 1 inputs before the first timestep, oldest first,
            [B, window - 1, I]; None is zeros.
        reverse: Run each sequence from its last timestep to its first.
        zoneout: As in `fo_pool`.
        longest: Timesteps of the longest packed sequence, if known. It changes the time only.

    Returns:
        h and c as `fo_pool`. Not differentiable.

    Raises:
        DTypeError: Not a half type, or dtypes that differ.
        InputError: Ranks, sizes, devices or zoneout that do not fit.
        KernelError: The GPU is no Hopper, or the weights do not fit in its shared memory.
    """
    arguments = (x, weight, bias, c0, offsets, previous, reverse, zoneout, longest)
    if x.is_cuda and not torch.is_grad_enabled() and goes_straight(*arguments[:6]):
        return cuda_layer.linear_fo_pool(*arguments)
    return torch.ops.qrnn.linear_fo_pool.default(*arguments)


def _forget_mult_fake(
    f: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    offsets: Tensor | None = None,
    reverse: bool = False,
) -> Tensor:
    checks.check_forget_mult(f, x, h0, offsets)
    return f.new_empty(f.shape)


def _forget_mult_backward_fake(
    grad_h: Tensor,
    f: Tensor,
    x: Tensor,
    h: Tensor,
    h0: Tensor | None,
    offsets: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = checks.check_forget_mult(f, x, h0, offsets)
    grad_h0 = f.new_empty((sizes.batch, sizes.hidden))
    return f.new_empty(f.shape), f.new_empty(f.shape), grad_h0


def _fo_pool_fake(
    gates: Tensor,
    c0: Tensor | None = None,
    offsets: Tensor | None = None,
    output_gate: bool = True,
    reverse: bool = False,
    zoneout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    sizes = checks.check_fo_pool(gates, c0, offsets, output_gate, zoneout)
    h = gates.new_empty((*gates.shape[:-1], sizes.hidden))
    return h, gates.new_empty((sizes.batch, sizes.hidden))


def _fo_pool_training_fake(
    gates: Tensor,
    c0: Tensor | None,
    offsets: Tensor | None,
    output_gate: bool,
    reverse: bool,
    zoneout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    h, c = _fo_pool_fake(gates, c0, offsets, output_gate, reverse, zoneout)
    if gates.device.type == "cpu":
        return h, c, gates.new_empty(0)
    sizes = PoolSizes(gates.shape[0], *c.shape)
    return (
        h,
        c,
        gates.new_empty(starts_shape(sizes, offsets is not None), dtype=compute_dtype(gates.dtype)),
    )


def _linear_fo_pool_fake(  # noqa: PLR0913, PLR0917  (the operator's arguments)
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    c0: Tensor | None = None,
    offsets: Tensor | None = None,
    previous: Tensor | None = None,
    reverse: bool = False,
    zoneout: float = 0.0,
    longest: int = 0,
) -> tuple[Tensor, Tensor]:
    sizes = checks.check_linear_fo_pool(x, weight, bias, c0, offsets, previous, zoneout)
    h = x.new_empty((*x.shape[:-1], sizes.hidden))
    return h, x.new_empty((sizes.batch, sizes.hidden))


def _fo_pool_backward_fake(  # noqa: PLR0913, PLR0917  (the operator's arguments)
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    gates: Tensor,
    c0: Tensor | None,
    offsets: Tensor | None,
    output_gate: bool,
    reverse: bool,
    zoneout: float,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    sizes = checks.check_fo_pool(gates, c0, offsets, output_gate, zoneout)
    return gates.new_empty(gates.shape), gates.new_empty((sizes.batch, sizes.hidden))


def _forget_mult_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    f, x, h0, offsets, reverse = inputs
    ctx.save_for_backward(f, x, output, h0, offsets)
    ctx.reverse = reverse


def _forget_mult_gradients(ctx: Any, grad_h: Tensor) -> tuple[Tensor | None, ...]:
    f, x, h, h0, offsets = ctx.saved_tensors
    grad_f, grad_x, grad_h0 = torch.ops.qrnn.forget_mult_backward.default(
        grad_h, f, x, h, h0, offsets, ctx.reverse
    )
    return grad_f, grad_x, None if h0 is None else grad_h0, None, None


class _FoPool(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        gates: Tensor,
        c0: Tensor | None,
        offsets: Tensor | None,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        h, c, starts = _below_autograd("fo_pool_training", gates, c0, offsets, *options)
        ctx.save_for_backward(gates, c0, offsets, starts)
        ctx.options = options
        # A model often uses one of h and c: no zeros are made for the other.
        ctx.set_materialize_grads(False)
        return h, c

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gates, c0, offsets, starts = ctx.saved_tensors
        if grad_h is None and grad_c is None:
            return (None,) * 6
        # With create_graph=True the operator's own backward says that there is none.
        run = torch.ops.qrnn.fo_pool_backward.default
        if not torch.is_grad_enabled():
            run = functools.partial(_below_autograd, "fo_pool_backward")
        grad_gates, grad_c0 = run(grad_h, grad_c, gates, c0, offsets, *ctx.options, starts)
        return grad_gates, None if c0 is None else grad_c0, None, None, None, None


def _wants_gradients(gates: Tensor, c0: Tensor | None) -> bool:
    differentiable = gates.requires_grad or (c0 is not None and c0.requires_grad)
    return differentiable and torch.is_grad_enabled()


def _fo_pool_with_gradients(
    gates: Tensor,
    c0: Tensor | None = None,
    offsets: Tensor | None = None,
    output_gate: bool = True,
    reverse: bool = False,
    zoneout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    arguments = (gates, c0, offsets, output_gate, reverse, zoneout)
    if _wants_gradients(gates, c0):
        return _FoPool.apply(*arguments)
    return _below_autograd("fo_pool", *arguments)


def _no_second_gradient(ctx: Any, *grads: Tensor) -> None:
    # Without this torch would return zeros or break the graph with no more than a warning.
    raise InputError(
        "the qrnn kernels are differentiable once; for second derivatives (create_graph=True) use "
        "qrnn_serve.kernels.reference, which autograd can differentiate any number of times"
    )


def _no_layer_gradient(ctx: Any, *grads: Tensor) -> None:
    raise InputError(
        "qrnn::linear_fo_pool is for inference and has no gradient; use torch.nn.functional.linear "
        "and qrnn::fo_pool"
    )


_FAKES = {
    "forget_mult": _forget_mult_fake,
    "forget_mult_backward": _forget_mult_backward_fake,
    "fo_pool": _fo_pool_fake,
    "fo_pool_training": _fo_pool_training_fake,
    "fo_pool_backward": _fo_pool_backward_fake,
}
_IMPLEMENTATIONS = {
    (name, device): getattr(module, name)
    for name in _FAKES
    for device, module in (("cpu", cpu), ("cuda", cuda))
}


def _below_autograd(name: str, *arguments: Any) -> Any:
    """An operator without its gradient."""
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    if goes_straight(*tensors):
        return _IMPLEMENTATIONS[name, tensors[0].device.type](*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.qrnn, name).default(*arguments)


def _register() -> None:
    for name, on_fake in _FAKES.items():
        for device in ("cpu", "cuda"):
            _LIBRARY.impl(name, _IMPLEMENTATIONS[name, device], device.upper())
        torch.library.register_fake(f"qrnn::{name}", on_fake, lib=_LIBRARY)
    _LIBRARY.impl("linear_fo_pool", cuda_layer.linear_fo_pool, "CUDA")
    torch.library.register_fake("qrnn::linear_fo_pool", _linear_fo_pool_fake, lib=_LIBRARY)
    torch.library.register_autograd("qrnn::linear_fo_pool", _no_layer_gradient, lib=_LIBRARY)
    torch.library.register_autograd(
        "qrnn::forget_mult",
        _forget_mult_gradients,
        setup_context=_forget_mult_setup,
        lib=_LIBRARY,
    )
    # torch's own registration has no place for what only a backward needs.
    _LIBRARY.impl("fo_pool", _fo_pool_with_gradients, "Autograd")
    for name in ("forget_mult_backward", "fo_pool_training", "fo_pool_backward"):
        torch.library.register_autograd(f"qrnn::{name}", _no_second_gradient, lib=_LIBRARY)


_register()
