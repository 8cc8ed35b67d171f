"""What our kernels are compared with, written for this benchmark, and the check of their numbers.

The original layer: the computation of the first public PyTorch QRNN, one operation after the other.
Scans: other ways to run h_t = f_t * x_t + (1 - f_t) * h_{t-1} over [T, B, H].
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan as higher_order_scan

from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, HALF_RELATIVE_NORM
from qrnn_serve.kernels import reference

SOURCE = Path(__file__).with_name("kernel_peers.cu")
STORAGE = {torch.float32: "float", torch.bfloat16: "Bfloat16"}
KERNELS = ("channel_scan", "channel_scan_backward", "block_scan")

# The original rounds to the dtype after each of its separate operations, ours once at the end.
STEPWISE_RELATIVE_NORM = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 1e-2}

MOST_BLOCK_THREADS = 256
MOST_CHANNEL_THREADS = 512


class OriginalLayer(nn.Module):
    """One layer of the original: a product, tanh, sigmoid, scan and output gate, each on its own.

    Args:
        linear: Its rows are Z, F, O; its columns the current input, then with window 2 the last.
        window: 1 or 2.
    """

    def __init__(self, linear: nn.Linear, window: int) -> None:
        super().__init__()
        self.linear = linear
        self.window = window

    def forward(self, values: Tensor) -> Tensor:
        """[T, B, I] to [T, B, H], from a state of zeros."""
        z, f, o = self.linear(shifted_columns(values, self.window)).chunk(3, dim=2)
        cells = ChannelScan.apply(torch.sigmoid(f).contiguous(), torch.tanh(z).contiguous())
        return torch.sigmoid(o) * cells


def shifted_columns(values: Tensor, window: int) -> Tensor:
    """[T, B, I], with window 2 beside the input of one timestep earlier: [T, B, 2 * I]."""
    if window == 1:
        return values
    shifted = torch.cat([torch.zeros_like(values[:1]), values[:-1]])
    return torch.cat([values, shifted], dim=2)


class ChannelScan(torch.autograd.Function):
    """The scan by one thread a channel, and its gradient."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, x: Tensor) -> Tensor:
        """The states, [T, B, H], of f and x."""
        states = channel_scan(f, x)
        ctx.save_for_backward(f, x, states)
        return states[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of f and x."""
        return channel_scan_backward(grads[0].contiguous(), *ctx.saved_tensors)


def channel_scan(f: Tensor, x: Tensor) -> Tensor:
    """States, [T + 1, B, H]: zeros, then after each timestep. One CUDA thread a channel."""
    timesteps, channels = f.shape[0], f[0].numel()
    states = f.new_empty(timesteps + 1, *f.shape[1:])
    states[0].zero_()
    _launch_over_channels("channel_scan", (f, x, states), timesteps, channels)
    return states


def channel_scan_backward(
    grad_h: Tensor, f: Tensor, x: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of f and x. One CUDA thread a channel."""
    timesteps, channels = f.shape[0], f[0].numel()
    grad_f, grad_x = torch.empty_like(f), torch.empty_like(x)
    tensors = (grad_h, f, x, states, grad_f, grad_x)
    _launch_over_channels("channel_scan_backward", tensors, timesteps, channels)
    return grad_f, grad_x


def block_scan(f: Tensor, x: Tensor) -> Tensor:
    """The method of accelerated-scan. f, x and the result are [B, H, T], contiguous."""
    h = torch.empty_like(f)
    batch, hidden, timesteps = f.shape
    steps = 16 // f.element_size()
    warps = -(-timesteps // (steps * 32))
    threads = min(32 * warps, MOST_BLOCK_THREADS)
    _launch("block_scan", batch * hidden, threads, (f, x, h), timesteps)
    return h


def empty_kernel() -> None:
    """A kernel that does nothing."""
    with _current_stream():
        _kernel("empty")((1,), (32,), ())


def associative_scan(f: Tensor, x: Tensor, combine_mode: str) -> Tensor:
    """The scan that comes with torch. Half types are computed in float32, as ours are.

    Args:
        f: Forget gate, [T, B, H].
        x: New values, as `f`.
        combine_mode: "pointwise" (compiled for a GPU) or "generic".
    """

    def join(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    wide = f if f.dtype == torch.float64 else f.float()
    pairs = (1 - wide, wide * x.to(wide.dtype))
    return higher_order_scan(join, pairs, dim=0, combine_mode=combine_mode)[1].to(f.dtype)


@dataclass(frozen=True)
class ScanPeer:
    """Another scan of the same recurrence.

    Attributes:
        run: From f and x to h.
        time_last: It wants [B, H, T] instead of [T, B, H], which is made for it before timing.
    """

    run: Callable[[Tensor, Tensor], Tensor]
    time_last: bool = False


def scan_peers() -> dict[str, ScanPeer]:
    """The scans to compare with, by name; a CUDA device runs all of them."""
    # Every shape is compiled on its own, and torch limits how often one function is.
    torch.compiler.reset()
    compiled = torch.compile(
        functools.partial(associative_scan, combine_mode="pointwise"), dynamic=False, fullgraph=True
    )
    peers = {
        "one thread a channel": ScanPeer(lambda f, x: channel_scan(f, x)[1:]),
        "accelerated-scan's method": ScanPeer(block_scan, time_last=True),
        "torch associative_scan": ScanPeer(compiled),
    }
    if importlib.util.find_spec("triton"):
        from kernel_peers_triton import TILES, tile_scan

        for tile in TILES:
            name = f"triton scan {tile.timesteps}x{tile.channels}"
            peers[name] = ScanPeer(functools.partial(tile_scan, tile=tile))
    return peers


def difference(got: Tensor, expected: Tensor) -> str | None:
    """What is wrong with a scan's result by the project's tolerances; None if nothing.

    Args:
        got: Result in float32, float16 or bfloat16.
        expected: The reference's, in float64, on any device.
    """
    wide = got.double().cpu()
    expected = expected.cpu()
    if got.dtype == torch.float32:
        error, limit = float((wide - expected).abs().max()), FLOAT32_MAX_ABS
    else:
        error = float((wide - expected).norm() / expected.norm())
        limit = HALF_RELATIVE_NORM[str(got.dtype).removeprefix("torch.")]
    # Written so that NaN does not pass.
    return None if error <= limit else f"wrong numbers: error {error:.2g}, allowed {limit:.2g}"


def stepwise_difference(got: Tensor, expected: Tensor) -> str | None:
    """As `difference`, for a computation that rounds after each of its separate operations."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    limit = STEPWISE_RELATIVE_NORM[got.dtype]
    return None if error <= limit else f"wrong numbers: error {error:.2g}, allowed {limit:.2g}"


def expected_scan(f: Tensor, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The reference's result on a part of the rows and channels, and what cuts that part out.

    Args:
        f: Forget gate, [T, B, H].
        x: New values, as `f`.

    Returns:
        h of the first and last sequence and of up to 64 channels, in float64; and a function that
        takes a whole result, [T, B, H], to that part.
    """
    batch, hidden = f.shape[1:]
    rows = sorted({0, batch - 1})
    channels = sorted({*range(min(32, hidden)), *range(max(0, hidden - 32), hidden)})

    def part(whole: Tensor) -> Tensor:
        return whole[:, rows][:, :, channels].cpu()

    return reference.forget_mult(part(f).double(), part(x).double()), part


def _launch_over_channels(
    name: str, tensors: Sequence[Tensor], timesteps: int, channels: int
) -> None:
    threads = min(tensors[0].shape[-1], MOST_CHANNEL_THREADS)
    _launch(name, -(-channels // threads), threads, tensors, timesteps, channels)


def _launch(name: str, blocks: int, threads: int, tensors: Sequence[Tensor], *sizes: int) -> None:
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"{name}: the tensors must be contiguous")
    kernel = _kernel(f"{name}<{STORAGE[tensors[0].dtype]}>")
    with _current_stream():
        kernel((blocks,), (threads,), (*(tensor.data_ptr() for tensor in tensors), *sizes))


def _current_stream() -> Any:
    return _external_stream(torch.cuda.current_stream().cuda_stream)


@functools.cache
def _external_stream(handle: int) -> Any:
    import cupy  # pyright: ignore[reportMissingImports]

    return cupy.cuda.ExternalStream(handle)


@functools.cache
def _kernel(name: str) -> Any:
    return _cuda_module().get_function(name)


@functools.cache
def _cuda_module() -> Any:
    import cupy  # pyright: ignore[reportMissingImports]

    names = [f"{kernel}<{storage}>" for kernel in KERNELS for storage in STORAGE.values()]
    return cupy.RawModule(
        code=SOURCE.read_text(), options=("--std=c++17",), name_expressions=["empty", *names]
    )
