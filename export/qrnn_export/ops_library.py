"""Builds the operators qrnn::* as a library for programs that have libtorch and no Python.

One source file (kernels/csrc/torch_ops.cpp) is compiled against the installed torch's stable
headers and linked with the archive of the kernels: the result needs libtorch and nothing of ours.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from qrnn_export.staging import publish, refuse_existing, staging_directory
from qrnn_export.torchscript_file import Version, torch_release
from qrnn_serve import kernels
from qrnn_serve.core.errors import ConfigError, KernelError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.kernels.library import native_archive

OLDEST_TORCH: Version = (2, 10)
"""The library loads in this release of torch and in newer ones, whichever it was built with."""

_SOURCES = Path(kernels.__file__).parent / "csrc"
_COMPILERS = ("c++", "g++", "clang++")
_SHOWN_LINES = 30

# Runs where none of our Python is loaded: the definition of fo_pool in torch's own operators.
_CHECK = """
import sys, torch
torch.ops.load_library(sys.argv[1])
torch.manual_seed(1611)
gates, cells, bounds = torch.randn(40, 99), torch.randn(3, 33), [0, 7, 7, 40]
h, c = torch.ops.qrnn.fo_pool(gates, cells, torch.tensor(bounds))
z, f, o = gates.double().chunk(3, dim=1)
want_h, want_c = torch.empty(40, 33).double(), cells.double()
for row, (start, stop) in enumerate(zip(bounds, bounds[1:])):
    for t in range(start, stop):
        forget = f[t].sigmoid()
        want_c[row] = forget * z[t].tanh() + (1 - forget) * want_c[row]
        want_h[t] = o[t].sigmoid() * want_c[row]
off = max(float((h - want_h).abs().max()), float((c - want_c).abs().max()))
if not off <= float(sys.argv[2]):
    sys.exit(f"fo_pool is off by {off:.1e}, allowed is {sys.argv[2]}")
"""


@dataclass(frozen=True, slots=True)
class OpsLibrary:
    """A library that was built and checked.

    Attributes:
        path: The file.
        compiler: The command that made it.
        torch_version: What it was built with.
    """

    path: Path
    compiler: str
    torch_version: str


def build_ops_library(
    target: str | Path,
    *,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> OpsLibrary:
    """Compile the operator library, and check its numbers in a fresh process.

    Args:
        target: The file to write. Its folder is made when missing.
        overwrite: Replace a file that exists.
        progress: Called with a sentence as each step begins.

    Returns:
        What was built. Nothing is written unless the library loads and computes rightly.

    Raises:
        ConfigError: The file exists, torch is too old, or there is no compiler that works.
        KernelError: The kernels are not built, or the new library does not give their numbers.
        OSError: The folder cannot be written to, or is full. Nothing was written.
    """
    say = progress or (lambda _: None)
    target = Path(target)
    refuse_old_torch(torch_release())
    refuse_existing([target], overwrite=overwrite)
    compiler = find_compiler()
    with staging_directory(target.parent) as staged:
        file = staged / target.name
        say(f"Compiling for torch {torch.__version__} with {compiler[0]}, some seconds")
        _run_compiler([*compiler, *_arguments(file)])
        say("Checking it in a fresh process")
        _check(file)
        (path,) = publish([file], target.parent)
    return OpsLibrary(path, shlex.join(compiler), torch.__version__)


def refuse_old_torch(release: Version) -> None:
    """Stop where torch has no stable interface that the source can use.

    Raises:
        ConfigError: It is older than `OLDEST_TORCH`.
    """
    if release < OLDEST_TORCH:
        oldest, found = (".".join(map(str, version)) for version in (OLDEST_TORCH, release))
        raise ConfigError(
            f"ops-library needs torch {oldest} or newer to build with, and so does the program "
            f"that loads it; found {found}. Use `qrnn-export --portable` for older ones"
        )


def find_compiler() -> list[str]:
    """The words of the C++ compiler's command: the variable CXX, or the first one installed.

    Raises:
        ConfigError: There is none.
    """
    if words := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(words[0]) is None:
            raise ConfigError(f"CXX names a compiler that is not there: {words[0]}")
        return words
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise ConfigError(
        f"no C++ compiler was found ({', '.join(_COMPILERS)}). Install one, for example with "
        "`apt install g++`, or set CXX to its command"
    )


def _arguments(file: Path) -> list[str]:
    package = Path(torch.__file__).parent
    major, minor = OLDEST_TORCH
    return [
        *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
        # Of torch, only what was there in the oldest release is used.
        f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#x}",
        *("-isystem", str(package / "include")),
        # Messages name source files; where they lie on this machine is of no use elsewhere.
        f"-ffile-prefix-map={_SOURCES}=csrc",
        f"-ffile-prefix-map={package / 'include'}=include",
        *(str(_SOURCES / "torch_ops.cpp"), str(native_archive()), "-o", str(file)),
        *(f"-L{package / 'lib'}", "-ltorch_cpu", "-pthread", "-ldl"),
        # The kernels stay inside, so that no other copy of them in a process takes their place, and
        # the library stays loaded, because its threads do.
        *("-Wl,--exclude-libs,ALL", "-Wl,-z,defs", "-Wl,-z,nodelete", f"-Wl,-soname,{file.name}"),
    ]


def _run_compiler(command: list[str]) -> None:
    done = _run(command)
    if done.returncode != 0:
        raise ConfigError(
            "the compiler failed; it must know C++17, as g++ 9 and clang++ 9 and newer do. It was "
            f"called as\n  {shlex.join(command)}\nand said\n{_last_lines(done)}"
        )


def _check(file: Path) -> None:
    done = _run([sys.executable, "-c", _CHECK, str(file), str(FLOAT32_MAX_ABS)])
    if done.returncode != 0:
        raise KernelError(
            "the library was built, but does not work in a fresh process, so nothing was written:\n"
            f"{_last_lines(done)}"
        )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603


def _last_lines(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + done.stderr).strip().splitlines()
    return "\n".join(lines[-_SHOWN_LINES:])
