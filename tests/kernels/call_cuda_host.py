"""Calls qrnn_cuda_fo_pool on tensors from a file: python call_cuda_host.py CALLS RESULTS.

CALLS is a list of dictionaries saved by torch: gates, c0, output_gate, reverse, zoneout, and
offsets, lengths or neither; gates are [T, B, C], packed [N, C] or, with lengths, [B, T, C]. RESULTS
are, for each, the status, the message, h and c.
"""

from __future__ import annotations

import ctypes
import struct
import sys

import torch

from qrnn_serve.kernels.cuda_compile import DTYPE_CODES
from qrnn_serve.kernels.library import native_library

MESSAGE_BYTES = 2048


def call(library, gates, c0, output_gate, reverse, zoneout, offsets=None, lengths=None):
    """One call; what it leaves unwritten stays NaN."""
    batch, hidden = c0.shape
    h = torch.full((*gates.shape[:-1], hidden), float("nan"), dtype=gates.dtype)
    c = torch.full(c0.shape, float("nan"), dtype=gates.dtype)
    time, sequence = (1, 0) if lengths is not None else (0, 1)
    timesteps = gates.shape[time]
    message = ctypes.create_string_buffer(MESSAGE_BYTES)

    def rows(tensor):
        return (
            tensor.data_ptr(),
            tensor.stride(time),
            0 if offsets is not None else tensor.stride(sequence),
        )

    def state(tensor):
        return tensor.data_ptr(), 0, tensor.stride(0)

    block = struct.pack(
        "=7qqd12q3q",  # qrnn_cuda_fo_pool_args
        *(DTYPE_CODES[gates.dtype], timesteps, batch, hidden, reverse),
        *(0 if tensor is None else tensor.data_ptr() for tensor in (offsets, lengths)),
        *(output_gate, zoneout),
        *(*rows(gates), *state(c0), *rows(h), *state(c)),
        *(0, ctypes.addressof(message), MESSAGE_BYTES),
    )
    status = library.qrnn_cuda_fo_pool(block)
    return status, message.value.decode(), h, c


if __name__ == "__main__":
    LIBRARY = ctypes.CDLL(str(native_library()))
    CALLS = torch.load(sys.argv[1])
    torch.save([call(LIBRARY, **arguments) for arguments in CALLS], sys.argv[2])
