"""The wheel: what is in it, and that it works without the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USE_ALL_FOUR = """
import numpy as np, torch
import qrnn_client, qrnn_export, qrnn_protos, qrnn_serve
assert {site!r} in qrnn_serve.__file__, qrnn_serve.__file__
from qrnn_serve.kernels import native_library
assert {site!r} in str(native_library()), native_library()
f = torch.tensor([0.5, 0.25, 1.0, 0.0]).view(4, 1, 1)
x = torch.tensor([1.0, -1.0, 2.0, 5.0]).view(4, 1, 1)
h = torch.ops.qrnn.forget_mult(f, x, torch.tensor([[0.4]]))
np.testing.assert_allclose(h.flatten().numpy(), [0.7, 0.275, 2.0, 2.0], atol=1e-6)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *(f"--config-settings=build-dir={folder / 'build'}", "-w", str(folder), str(ROOT)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_wheel_holds_exactly_our_four_packages(wheel):
    """Nothing lands in site-packages but the four names, the sources of the kernels included."""
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}

    assert top == {"qrnn_serve", "qrnn_export", "qrnn_client", "qrnn_protos"}
    for built in ("libqrnn_kernels.so", "libqrnn_kernels.a", "csrc/torch_ops.cpp"):
        assert f"qrnn_serve/kernels/{built}" in names
    assert any(name.endswith(".cu") for name in names)
    assert {f"{package}/py.typed" for package in top} <= set(names)


def test_wheel_works_outside_the_checkout(wheel, tmp_path):
    """An environment with only the wheel imports all packages, runs a kernel, builds for C++."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    # Dependencies come from this environment; a plain path line runs none of its .pth hooks, so the
    # editable install does not reach the new environment.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for arguments in (
        ["-c", USE_ALL_FOUR.format(site=str(site))],
        ["-m", "qrnn_export.cli", "ops-library"],
    ):
        done = subprocess.run(
            [tmp_path / "venv/bin/python", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

        assert done.returncode == 0, done.stderr
    assert (tmp_path / "libqrnn_torch_ops.so").is_file()
