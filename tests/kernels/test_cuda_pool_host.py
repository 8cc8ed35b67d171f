"""The C host of the CUDA kernels, over a driver and a compiler that need no GPU."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qrnn_serve.kernels import cuda_compile, plan, reference
from qrnn_serve.kernels.cuda_compile import CACHE_VARIABLE, KernelKey
from support.cuda_on_host import HOST_DTYPES
from support.pool_cases import SEQUENCES, assert_near, dense, packed, pool_inputs

# Rows that begin at multiples of 16 bytes, and of 8.
LONG = [pytest.param(packed(300, 0, 65, hidden=hidden)) for hidden in (64, 36)]


class WithoutPython:
    """Runs the calls of call_cuda_host.py: the C host, over a driver and compilers on the host."""

    def __init__(self, folder, kernels):
        self.folder = folder
        self._environment = {
            "LD_LIBRARY_PATH": str(folder),
            "QRNN_HOST_KERNELS": str(kernels),
            CACHE_VARIABLE: str(folder / "cache"),
        }

    def start(self, calls, name="", **environment):
        """A process at work, its results going to a file of that name."""
        files = [str(self.folder / f"{file}{name}.pt") for file in ("calls", "results")]
        torch.save(calls, files[0])
        script = Path(__file__).with_name("call_cuda_host.py")
        command = [sys.executable, "-W", "ignore", str(script), *files]
        environment = os.environ | self._environment | environment
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def result(self, process, name=""):
        """What it computed, and what it said."""
        _, said = process.communicate()
        assert process.returncode == 0, said
        return torch.load(self.folder / f"results{name}.pt"), said

    def run(self, calls, **environment):
        """The results of the calls in a process of their own."""
        return self.result(self.start(calls, **environment))[0]


def build_driver(path, release):
    """The driver, or the compiler of a release, under the name that its users ask for."""
    source = Path(__file__).with_name("cuda_driver_on_host.cpp")
    command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-DQRNN_RELEASE={release}"]
    command += [f"-Wl,-soname,{path.name}", "-o", str(path), str(source), "-ldl"]
    subprocess.run(command, check=True)


@pytest.fixture(scope="session")
def without_python(host_kernels):
    """The C host in processes without a GPU."""
    folder = host_kernels.folder / "driver"
    folder.mkdir()
    build_driver(folder / "libcuda.so.1", 0)
    for release in (12, 13):
        build_driver(folder / f"libnvrtc.so.{release}", release)
    for dtype in HOST_DTYPES:
        host_kernels.built(KernelKey("qrnn_fo_pool", dtype, 1))
        for row_bytes in plan.ROW_BYTES if plan.widest_channels(dtype) > 1 else ():
            host_kernels.built(KernelKey("qrnn_fo_pool", dtype, 2, False, row_bytes))
    host_kernels.built(KernelKey("qrnn_prepare", torch.float32, 1))
    return WithoutPython(folder, host_kernels.folder)


def test_the_host_without_python_matches_reference(without_python):
    """Dense, packed and padded rows, whole and in tiles, aligned and not, in every dtype."""
    calls, expected = [], []
    cases = [
        (layout.values[0], dtype, output_gate, reverse)
        for layout in [*SEQUENCES, *LONG]
        for dtype in HOST_DTYPES
        for output_gate, reverse in ((True, False), (False, True))
    ]
    for layout, dtype, output_gate, reverse in cases:
        gates, c0 = pool_inputs(layout, dtype, output_gate)
        options = {"output_gate": output_gate, "reverse": reverse, "zoneout": 0.3}
        offsets = layout.offsets("cpu")
        want = reference.fo_pool(
            gates.double(), c0.double(), offsets, output_gate, reverse, zoneout=0.3
        )
        calls.append({"gates": gates, "c0": c0, "offsets": offsets, **options})
        expected.append(want)
        if layout.packed:
            lengths = torch.tensor(layout.lengths, dtype=torch.int64)
            real = torch.arange(max([*layout.lengths, 1])) < lengths[:, None]
            padded = torch.full((*real.shape, gates.shape[1]), float("nan"), dtype=dtype)
            padded[real] = gates
            h = torch.zeros(*real.shape, layout.hidden, dtype=torch.float64)
            h[real] = want[0]
            calls.append({"gates": padded, "c0": c0, "lengths": lengths, **options})
            expected.append((h, want[1]))

    results = without_python.run(calls)

    for (status, message, h, c), (want_h, want_c) in zip(results, expected, strict=True):
        assert (status, message) == (0, "")
        assert_near(h, want_h)
        assert_near(c, want_c)


def test_the_host_without_python_says_what_is_wrong(without_python, tmp_path):
    """A refusal of the compiler, of wrong arguments, and of memory that is not the GPU's."""
    gates, c0 = pool_inputs(dense(3, 2, 5), torch.float32, True)
    call = {"gates": gates, "c0": c0, "output_gate": True, "reverse": False, "zoneout": 0.0}
    offsets = torch.tensor([0, 2, 3])

    ((status, message, *_),) = without_python.run(
        [call], QRNN_COMPILER_FAILS="1", **{CACHE_VARIABLE: str(tmp_path)}
    )
    assert status == 5
    assert "cuda:1: NVRTC 13.0 cannot compile qrnn_fo_pool_short for sm_90" in message
    assert "line one" in message
    both = without_python.run(
        [{**call, "zoneout": 1.5}, {**call, "offsets": offsets, "lengths": offsets[:2]}]
    )
    assert [status for status, *_ in both] == [1, 1]
    assert "zoneout: expected 0 to 1" in both[0][1]
    assert "exclude offsets" in both[1][1]


def test_the_host_without_python_needs_a_driver(without_python):
    """Where there is none, the message says so, and the process goes on."""
    gates, c0 = pool_inputs(dense(3, 2, 5), torch.float32, True)
    call = {"gates": gates, "c0": c0, "output_gate": True, "reverse": False, "zoneout": 0.0}
    if torch.cuda.is_available():
        pytest.skip("this machine has one")

    ((status, message, *_),) = without_python.run([call], LD_LIBRARY_PATH="")

    assert status == 5
    assert "cannot load the CUDA driver" in message


@pytest.fixture
def packed_call():
    """A call of two kernels, float32: tiles of packed rows are prepared first."""
    layout = packed(300, 0, 65, hidden=5)
    gates, c0 = pool_inputs(layout, torch.float32, True)
    options = {"output_gate": True, "reverse": False, "zoneout": 0.0}
    return {"gates": gates, "c0": c0, "offsets": layout.offsets("cpu"), **options}


@pytest.mark.parametrize(
    ("driver", "loaded", "expected"),
    [(12, None, 12), (14, None, 13), (13, 12, 12), (12, 13, 12)],
)
def test_the_compiler_is_one_whose_code_the_driver_takes(
    without_python, packed_call, tmp_path, driver, loaded, expected
):
    """One that the process has loaded comes first, and none is newer than the driver."""
    environment = {
        "QRNN_DRIVER_RELEASE": str(driver),
        "QRNN_COMPILED": str(tmp_path / "log"),
        CACHE_VARIABLE: str(tmp_path / "cache"),
    }
    if loaded:
        environment["LD_PRELOAD"] = str(without_python.folder / f"libnvrtc.so.{loaded}")

    ((status, message, *_),) = without_python.run([packed_call], **environment)

    assert (status, message) == (0, "")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[0] for line in lines] == [str(expected)] * 2


def test_a_driver_older_than_every_compiler_is_named(without_python, packed_call):
    """Its words say what to do."""
    ((status, message, *_),) = without_python.run([packed_call], QRNN_DRIVER_RELEASE="11")

    assert status == 5
    assert "the CUDA driver is older than CUDA 12; update it" in message


LOAD_AND_TELL = """
from pathlib import Path
from qrnn_serve.kernels.library import load_cuda_compiler
load_cuda_compiler()
maps = Path("/proc/self/maps").read_text().splitlines()
print(*sorted({line.split("/", 1)[1] for line in maps if "libnvrtc" in line}))
"""


@pytest.mark.parametrize(
    ("driver", "loaded", "expected"),
    [
        ("13", None, ["packages/nvidia/cu13/lib/libnvrtc.so.13"]),
        ("12", None, ["packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"]),
        ("13", "12", ["libnvrtc.so.12"]),
        ("12", "13", ["libnvrtc.so.13", "packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"]),
        ("", None, []),
    ],
)
def test_python_loads_the_compiler_of_its_packages(
    without_python, tmp_path, driver, loaded, expected
):
    """By the same rule as the library; without a driver none is loaded."""
    for release, package in ((12, "cuda_nvrtc"), (13, "cu13")):
        folder = tmp_path / "packages/nvidia" / package / "lib"
        folder.mkdir(parents=True)
        name = f"libnvrtc.so.{release}"
        shutil.copy(without_python.folder / name, folder / name)
        shutil.copy(without_python.folder / name, tmp_path / name)
    (tmp_path / "driver").mkdir()
    if driver:
        shutil.copy(without_python.folder / "libcuda.so.1", tmp_path / "driver")
    elif torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path / "packages"),
        "LD_LIBRARY_PATH": str(tmp_path / "driver"),
        "QRNN_DRIVER_RELEASE": driver,
    }
    if loaded:
        environment["LD_PRELOAD"] = str(tmp_path / f"libnvrtc.so.{loaded}")

    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_TELL],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split() == [str(tmp_path / name)[1:] for name in expected]


def test_compiled_kernels_are_kept_for_python_too(
    without_python, packed_call, tmp_path, monkeypatch
):
    """The second process compiles nothing, and Python finds the files by its own names."""
    cache, log = tmp_path / "new/cache", tmp_path / "log"
    environment = {CACHE_VARIABLE: str(cache), "QRNN_COMPILED": str(log)}

    first, second = (without_python.run([packed_call], **environment) for _ in range(2))

    assert all(map(torch.equal, first[0][2:], second[0][2:]))
    assert len(log.read_text().splitlines()) == 2
    monkeypatch.setattr(cuda_compile, "compiler_version", lambda: "13.0")
    pool = KernelKey("qrnn_fo_pool", torch.float32, 1)
    keys = [pool, KernelKey("qrnn_prepare", torch.float32, 1)]
    assert {path.name for path in cache.iterdir()} == {
        cuda_compile._cache_name(key, 90) for key in keys
    }
    image = cuda_compile._kept(cache / cuda_compile._cache_name(pool, 90))
    assert image == (" ".join([*cuda_compile._options(pool, 90), ""]) + "\0").encode()
    far = packed_call | {"gates": packed_call["gates"].as_strided((0, 15), (2**28, 1))}
    far["offsets"] = torch.zeros(4, dtype=torch.int64)
    without_python.run([far], **environment)
    far_name = cuda_compile._cache_name(pool._replace(kernel="qrnn_fo_pool_short", far=True), 90)
    assert (cache / far_name).is_file()


def test_processes_that_start_together_share_the_cache(without_python, packed_call, tmp_path):
    """Each reads whole files, and nothing else is left behind."""
    names = [str(number) for number in range(3)]
    cache = {CACHE_VARIABLE: str(tmp_path / "cache")}

    started = [without_python.start([packed_call], name, **cache) for name in names]
    done = [without_python.result(*pair) for pair in zip(started, names, strict=True)]

    for results, said in done:
        assert (results[0][0], said) == (0, "")
        assert torch.equal(results[0][2], done[0][0][0][2])
    kept = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert len(kept) == 2
    assert all(name.startswith("qrnn-sm90-") for name in kept)


def test_damaged_kept_kernels_are_compiled_again(without_python, packed_call, tmp_path):
    """A file cut short, or changed, is never handed to the driver; it is replaced."""
    environment = {CACHE_VARIABLE: str(tmp_path), "QRNN_COMPILED": str(tmp_path / "log")}
    without_python.run([packed_call], **environment)
    short, changed = tmp_path.glob("*.cubin")
    whole = {path: path.read_bytes() for path in (short, changed)}
    short.write_bytes(whole[short][:20])
    changed.write_bytes(whole[changed][:-1] + b"?")

    results, said = without_python.result(without_python.start([packed_call], **environment))

    assert results[0][:2] == (0, "")
    assert sorted(said.splitlines()) == sorted(
        f"qrnn: {path} is damaged: compiling the kernel again" for path in whole
    )
    assert {path: path.read_bytes() for path in whole} == whole
    assert len((tmp_path / "log").read_text().splitlines()) == 4


def test_a_folder_that_takes_no_files_is_said_once(without_python, packed_call, tmp_path):
    """The kernels work all the same."""
    (tmp_path / "file").write_text("in the way")
    cache = {CACHE_VARIABLE: str(tmp_path / "file")}

    results, said = without_python.result(without_python.start([packed_call], **cache))

    assert results[0][:2] == (0, "")
    folder = tmp_path / "file"
    assert said == f"qrnn: compiled CUDA kernels cannot be kept in {folder}: Not a directory\n"


SHA256_OF_LINES = r"""
#include <cstdio>
#include <iostream>
#include "sha256.h"
int main() {
    for (std::string line; std::getline(std::cin, line);) {
        for (const unsigned char byte : qrnn::sha256(line)) std::printf("%02x", byte);
        std::puts("");
    }
}
"""


def test_sha256_is_that_of_hashlib(tmp_path):
    """Around every edge of its blocks of 64 bytes."""
    (tmp_path / "hash.cpp").write_text(SHA256_OF_LINES)
    folder = str(Path(cuda_compile.__file__).parent / "csrc")
    command = ["c++", "-std=c++17", "-I", folder, "-o", "hash", "hash.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    lines = [bytes(32 + (7 * i) % 223 for i in range(size)) for size in [*range(200), 100_000]]

    done = subprocess.run(
        [tmp_path / "hash"], input=b"\n".join(lines) + b"\n", capture_output=True, check=True
    )

    assert done.stdout.decode().split() == [hashlib.sha256(line).hexdigest() for line in lines]
