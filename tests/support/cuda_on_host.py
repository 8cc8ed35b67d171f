"""The CUDA kernels as plain C++, so that they run where there is no GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from qrnn_serve.kernels import cuda_compile
from qrnn_serve.kernels.cuda_compile import DTYPE_CODES
from qrnn_serve.kernels.plan import THREADS_PER_BLOCK

HOST_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
RESIDENT_BLOCKS = 3
FRAME = Path(__file__).parents[1] / "kernels" / "cuda_on_host.cpp"


class HostKernels:
    """The source built for the host, one library a dtype and width, when it is first needed."""

    def __init__(self, folder):
        self._compiler = shutil.which("c++")
        if self._compiler is None:
            pytest.skip("needs a C++ compiler named c++ on PATH")
        self.folder = folder
        self._libraries = {}

    def launch(self, key, blocks, index, arguments, threads=THREADS_PER_BLOCK):
        """Run one kernel, as `cuda.launch`."""
        library = self.built(key)
        launch = library.launch
        launch.argtypes = [
            *(ctypes.c_char_p, ctypes.c_longlong),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_char_p),
        ]
        name = key.kernel.encode()
        size = launch(name, blocks, threads, RESIDENT_BLOCKS, arguments)
        assert size == len(arguments), "the packed arguments are not the kernel's struct"

    def built(self, key):
        """The library for a dtype and width."""
        key = key._replace(kernel="qrnn_fo_pool")  # a library holds them all
        if key not in self._libraries:
            far = "far" if key.far else ""
            path = self.folder / f"{DTYPE_CODES[key.dtype]}{key.channels}{far}-{key.row_bytes}.so"
            options = [o for o in cuda_compile._options(key, 90) if o.startswith("-DQRNN")]
            command = [
                *(self._compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"),
                *(option for option in options if "ONLY" not in option),
                f'-DQRNN_SOURCE="{cuda_compile.SOURCE_PATH}"',
                *("-o", str(path), str(FRAME)),
            ]
            subprocess.run(command, check=True)
            self._libraries[key] = ctypes.CDLL(str(path))
        return self._libraries[key]
