"""Loads the compiled CUDA kernels and launches them. Knows no tensors."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import torch

from qrnn_serve.core.errors import KernelError
from qrnn_serve.kernels.cuda_compile import compiled_kernels, compiler_version, cupy_cuda

KERNEL_NAMES = (
    "qrnn_forget_mult",
    "qrnn_forget_mult_backward",
    "qrnn_fo_pool",
    "qrnn_fo_pool_backward",
    "qrnn_f_pool",
    "qrnn_f_pool_backward",
)
THREADS_PER_BLOCK = 128
_MOST_BLOCKS = 2**31 - 1
# More than any argument block; the driver reads as much as the kernel takes.
_ARGUMENT_BYTES = 512


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Blocks and threads of a one-dimensional launch."""

    blocks: int
    threads: int


def launch_shape(lines: int) -> LaunchShape:
    """One thread for each of `lines` channels of sequences; past the limit threads loop."""
    blocks = (lines + THREADS_PER_BLOCK - 1) // THREADS_PER_BLOCK
    return LaunchShape(min(blocks, _MOST_BLOCKS), THREADS_PER_BLOCK)


class KernelModule:
    """The kernels of one dtype on one device, which must be current; made by `kernel_module`."""

    def __init__(self, image: bytes, device_index: int) -> None:
        cuda = cupy_cuda()
        self._driver = cuda.driver
        self._runtime = cuda.runtime
        self._device_index = device_index
        self._bind_thread()
        module = self._driver.moduleLoadData(image)
        self._functions = {
            name: self._driver.moduleGetFunction(module, name) for name in KERNEL_NAMES
        }
        for function in self._functions.values():
            # The driver loads code lazily, and a CUDA graph must not be the first to ask for it.
            self._driver.funcGetAttribute(self._driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function)

    def launch(self, name: str, shape: LaunchShape, stream: int, arguments: bytes) -> None:
        """Queue one kernel.

        Args:
            name: One of KERNEL_NAMES.
            shape: Blocks and threads.
            stream: Handle of a stream of this device, which must be current.
            arguments: The kernel's argument block.

        Raises:
            KernelError: The driver refused the launch.
        """
        self._bind_thread()
        ctypes.memmove(_block.arguments, arguments, len(arguments))
        try:
            self._driver.launchKernel(
                self._functions[name],
                shape.blocks,
                1,
                1,
                shape.threads,
                1,
                1,
                0,
                stream,
                _block.parameters_address,
                0,
            )
        except self._driver.CUDADriverError as error:
            raise KernelError(
                f"{name} could not be launched on cuda:{self._device_index} with grid "
                f"({shape.blocks}, 1, 1) and block ({shape.threads}, 1, 1): {error}"
            ) from error

    def _bind_thread(self) -> None:
        if not self._driver.ctxGetCurrent():
            # This thread has used no CUDA yet, and the driver's functions bind no context
            # themselves.
            self._runtime.setDevice(self._device_index)


def kernel_module(device_index: int, dtype: torch.dtype) -> KernelModule:
    """The kernels for a dtype on a device, which must be current; loaded at the first call.

    Raises:
        KernelError: CuPy is missing, the compiler does not know the architecture, or the compiled
            code cannot be loaded.
    """
    key = (device_index, dtype)
    module = _modules.get(key)
    if module is not None:
        return module
    with _modules_lock:
        if key not in _modules:
            _modules[key] = _load(device_index, dtype)
        return _modules[key]


def driver_version() -> str:
    """The newest CUDA that the driver supports, for example "13.0".

    Raises:
        KernelError: CuPy is missing or cannot reach the driver.
    """
    runtime = cupy_cuda().runtime
    try:
        version = runtime.driverGetVersion()
    except runtime.CUDARuntimeError as error:
        raise KernelError(f"CuPy cannot reach the CUDA driver: {error}") from error
    return f"{version // 1000}.{version % 1000 // 10}"


class _ArgumentBlock(threading.local):
    """Memory through which a thread hands arguments to the driver, which copies them at once."""

    def __init__(self) -> None:
        self.arguments = ctypes.create_string_buffer(_ARGUMENT_BYTES)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        self.parameters_address = ctypes.addressof(self._parameters)


_block = _ArgumentBlock()
_modules: dict[tuple[int, torch.dtype], KernelModule] = {}
_modules_lock = threading.Lock()


def _load(device_index: int, dtype: torch.dtype) -> KernelModule:
    driver_error = cupy_cuda().driver.CUDADriverError
    major, minor = torch.cuda.get_device_capability(device_index)
    architecture = 10 * major + minor
    image = compiled_kernels(dtype, architecture)
    try:
        return KernelModule(image, device_index)
    except driver_error as error:
        raise KernelError(
            f"the driver of cuda:{device_index} (sm_{architecture}) cannot load what NVRTC "
            f"{compiler_version()} compiled: {error}. The driver supports CUDA {driver_version()}; "
            "update it, or install the CuPy extra of an older CUDA"
        ) from error
