"""Loads the compiled CUDA kernels and launches them. Knows no tensors."""

from __future__ import annotations

import ctypes
import threading

import torch

from qrnn_serve.core.errors import KernelError
from qrnn_serve.kernels.cuda_compile import (
    Compilation,
    compiled_kernel,
    compiler_version,
    cupy_cuda,
)

# More than any argument block; the driver reads as much as the kernel takes.
_ARGUMENT_BYTES = 512
# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of the driver's interface.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class LoadedKernel:
    """One kernel on one device, which must be current; made by `loaded_kernel`."""

    def __init__(self, image: bytes, key: Compilation, device_index: int) -> None:
        cuda = cupy_cuda()
        self._driver = cuda.driver
        self._runtime = cuda.runtime
        self._name = key.kernel
        self._device_index = device_index
        self._resident: dict[int, int] = {}
        self._bind_thread()
        self._module = self._driver.moduleLoadData(image)
        self._function = self._driver.moduleGetFunction(self._module, key.kernel)
        self._shared_bytes = key.shared_bytes
        if self._shared_bytes is None:
            self._shared_bytes = self._number(f"{key.kernel}_shared_bytes")
        # The driver loads code lazily, and a CUDA graph must not be the first to ask for it.
        self._driver.funcGetAttribute(self._driver.CU_FUNC_ATTRIBUTE_NUM_REGS, self._function)
        if self._shared_bytes:
            self._driver.funcSetAttribute(
                self._function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, self._shared_bytes
            )

    def launch(self, blocks: int, threads: int, stream: int, arguments: bytes) -> None:
        """Queue the kernel.

        Args:
            blocks: Of the grid.
            threads: Of each block.
            stream: Handle of a stream of this device, which must be current.
            arguments: The kernel's argument block.

        Raises:
            KernelError: The driver refused the launch.
        """
        self._bind_thread()
        ctypes.memmove(_block.arguments, arguments, len(arguments))
        try:
            self._driver.launchKernel(
                self._function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                self._shared_bytes,
                stream,
                _block.parameters_address,
                0,
            )
        except self._driver.CUDADriverError as error:
            raise KernelError(
                f"{self._name} could not be launched on cuda:{self._device_index} with grid "
                f"({blocks}, 1, 1) and block ({threads}, 1, 1): {error}"
            ) from error

    def resident_blocks(self, threads: int) -> int:
        """Blocks of so many threads that the device holds at once."""
        if threads not in self._resident:
            self._bind_thread()
            each = self._driver.occupancyMaxActiveBlocksPerMultiprocessor(
                self._function, threads, self._shared_bytes
            )
            properties = torch.cuda.get_device_properties(self._device_index)
            self._resident[threads] = each * properties.multi_processor_count
        return self._resident[threads]

    def _number(self, name: str) -> int:
        number = ctypes.c_uint()
        address = self._driver.moduleGetGlobal(self._module, name)
        to_host = self._runtime.memcpyDeviceToHost
        self._runtime.memcpy(ctypes.addressof(number), address, ctypes.sizeof(number), to_host)
        return number.value

    def _bind_thread(self) -> None:
        if not self._driver.ctxGetCurrent():
            # This thread has used no CUDA yet, and the driver's functions bind no context
            # themselves.
            self._runtime.setDevice(self._device_index)


def loaded_kernel(device_index: int, key: Compilation) -> LoadedKernel:
    """A kernel on a device, which must be current; compiled and loaded at the first call.

    Raises:
        KernelError: CuPy is missing, the compiler does not know the architecture, or the compiled
            code cannot be loaded.
    """
    place = (device_index, key)
    kernel = _kernels.get(place)
    if kernel is not None:
        return kernel
    with _kernels_lock:
        if place not in _kernels:
            _kernels[place] = _load(device_index, key)
        return _kernels[place]


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
_kernels: dict[tuple[int, Compilation], LoadedKernel] = {}
_kernels_lock = threading.Lock()


def _load(device_index: int, key: Compilation) -> LoadedKernel:
    driver_error = cupy_cuda().driver.CUDADriverError
    major, minor = torch.cuda.get_device_capability(device_index)
    architecture = 10 * major + minor
    image = compiled_kernel(key, architecture)
    try:
        return LoadedKernel(image, key, device_index)
    except driver_error as error:
        raise KernelError(
            f"the driver of cuda:{device_index} (sm_{architecture}) cannot load what NVRTC "
            f"{compiler_version()} compiled: {error}. The driver supports CUDA {driver_version()}; "
            "update it, or install the CuPy extra of an older CUDA"
        ) from error
