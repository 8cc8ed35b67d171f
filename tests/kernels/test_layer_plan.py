"""The rule that chooses one kernel for a whole layer, and its shapes."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qrnn_serve.kernels import cuda_compile, cuda_layer, layer_plan
from qrnn_serve.kernels.layer_plan import LayerSizes, plan_layer

PROCESSORS = 132
SOURCE = cuda_compile.SOURCE_PATH.parent / "fused_layer.cu"


def sizes(timesteps, batch, inputs, hidden, *, longest=None, window=1):
    """Dense sizes; with `longest`, those of a packed batch of as many timesteps."""
    packed = longest is not None
    return LayerSizes(
        timesteps=timesteps * batch if packed else timesteps,
        batch=batch,
        hidden=hidden,
        inputs=inputs,
        window=window,
        longest=longest if packed else timesteps,
        packed=packed,
    )


def plan(*args, **options):
    return plan_layer(sizes(*args, **options), torch.bfloat16, PROCESSORS)


@pytest.mark.parametrize(
    ("shape", "pays"),
    [
        pytest.param((512, 256, 320, 320), True, id="many-long"),
        pytest.param((512, 24, 320, 320), True, id="one-round-of-blocks"),
        pytest.param((512, 8, 320, 320), False, id="few-sequences"),
        pytest.param((32, 256, 320, 320), False, id="short"),
        pytest.param((32, 8, 320, 320), False, id="small"),
        pytest.param((1, 1, 8, 1), False, id="tiny"),
        pytest.param((0, 4, 64, 64), False, id="no-timesteps"),
        pytest.param((4, 0, 64, 64), False, id="no-sequences"),
    ],
)
def test_one_kernel_only_where_it_wins(shape, pays):
    """The rule agrees with what was measured (docs/fused-layer.md)."""
    assert plan(*shape).pays == pays


def test_one_long_sequence_among_short_ones_keeps_two_kernels():
    """A block walks a sequence in order, so the longest sequence bounds the time."""
    assert plan(512, 256, 320, 320, longest=1024).pays
    assert not plan(512, 256, 320, 320, longest=100_000).pays


@pytest.mark.parametrize(("inputs", "window"), [(8, 1), (320, 1), (160, 2), (384, 1), (64, 6)])
def test_up_to_384_columns_fit(inputs, window):
    """The weights of 64 channels, and enough stages beside them."""
    assert plan(512, 256, inputs, 320, window=window).key.stages >= 4


@pytest.mark.parametrize(("inputs", "window"), [(640, 1), (320, 2), (456, 1)])
def test_wide_weights_do_not_fit(inputs, window):
    """There is no plan, so the layer runs two kernels."""
    assert plan(512, 256, inputs, 320, window=window) is None


@pytest.mark.parametrize("hidden", [1, 63, 64, 65, 320, 8448, 20_000])
@pytest.mark.parametrize("batch", [1, 3, 25, 26, 27, 70_000])
def test_blocks_cover_all_channels(batch, hidden):
    """Every set of channels has as many blocks as the others, and no more than sequences."""
    chosen = plan(100, batch, 64, hidden)

    assert chosen.blocks == chosen.workers * -(-hidden // 64)
    assert 1 <= chosen.workers <= batch


def test_plan_in_words():
    """People read blocks, tile and both estimates."""
    text = str(plan(512, 256, 320, 320))

    assert re.fullmatch(
        r"130 blocks of 64 channels x 128 timesteps, about \d+ us against \d+", text
    )


def test_choice_on_the_cpu():
    """CPU tensors run two kernels, and the choice says why."""
    x, c0 = torch.zeros(3, 2, 8).half(), torch.zeros(2, 4).half()

    choice = cuda_layer.choose(x, torch.zeros(12, 8).half(), c0, None)

    assert choice.plan is None
    assert str(choice) == (
        "two kernels, matrix product and pool: there is one for CUDA devices only, not for cpu"
    )


@pytest.fixture
def hopper_call(monkeypatch):
    """Calls `choose` on tensors of a made-up Hopper GPU."""
    monkeypatch.setattr(cuda_layer, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(cuda_layer, "_processors", lambda index: PROCESSORS)

    def call(shape=(512, 256, 320), columns=None, dtype=torch.float16, c0_dtype=None, **options):
        packed = len(shape) == 2
        with FakeTensorMode():
            x = torch.empty(shape, dtype=dtype, device="cuda")
            weight = torch.empty(960, columns or shape[-1], dtype=dtype, device="cuda")
            c0 = torch.empty(256, 320, dtype=c0_dtype or dtype, device="cuda")
            offsets = torch.empty(257, dtype=torch.int64, device="cuda") if packed else None
            return str(cuda_layer.choose(x, weight, c0, offsets, **options))

    return call


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "one kernel: 130 blocks"),
        ({"shape": (131_072, 320), "longest": 600}, "one kernel: 130 blocks"),
        ({"shape": (131_072, 320)}, "the longest sequence is not known"),
        ({"dtype": torch.float32}, "float16 or bfloat16, the same for inputs and weights"),
        ({"c0_dtype": torch.float32}, "float16 or bfloat16, the same for inputs and weights"),
        ({"shape": (512, 256, 321)}, "multiples of 8 inputs"),
        ({"shape": (512, 256, 640)}, "weights of 640 columns do not fit in shared memory"),
        ({"columns": 640}, "weights of 640 columns do not fit in shared memory"),
        ({"shape": (3, 256, 320)}, "one would not pay: "),
        ({"shape": (2**30 + 1, 256, 320)}, "at most 1073741824 timesteps or sequences"),
    ],
)
def test_choice_on_a_hopper_gpu(hopper_call, changes, expected):
    """What keeps a call from being one kernel is said in words."""
    assert expected in hopper_call(**changes)


def test_choice_on_an_older_gpu(hopper_call, monkeypatch):
    """Other architectures run two kernels."""
    monkeypatch.setattr(cuda_layer, "_capability", lambda index: (8, 0))

    assert "one needs a Hopper GPU" in hopper_call()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
@pytest.mark.parametrize(
    "key",
    [
        plan_layer(sizes(timesteps, 1024, inputs, 320), dtype, PROCESSORS).key
        for (timesteps, inputs), dtype in itertools.product(
            [(512, 384), (64, 320)], [torch.float16, torch.bfloat16]
        )
    ],
    ids=lambda key: f"{key.dtype}-{key.tile}",
)
def test_nvcc_compiles_without_spills(key, tmp_path):
    """The accumulators stay in registers, and the products are those of the tensor cores."""
    command = [
        *("nvcc", "-std=c++17", "-Werror", "all-warnings", "-Xptxas", "-v"),
        *("-gencode", "arch=compute_90a,code=sm_90a", "-cubin", "-o", str(tmp_path / "out")),
        *(o for o in cuda_compile._options(key, 90) if o.startswith("-D")),
        str(SOURCE),
    ]

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 bytes spill stores" in done.stdout + done.stderr
    # setmaxnreg moves registers between warps: it counts on this number for all of them.
    assert "Used 168 registers" in done.stdout + done.stderr


def test_nvrtc_compiles_for_the_exact_architecture(tmp_path, monkeypatch):
    """The target of NVRTC has Hopper's own instructions."""
    pytest.importorskip("cupy")
    monkeypatch.setenv(cuda_compile.CACHE_VARIABLE, str(tmp_path))
    key = plan(512, 256, 64, 320).key

    assert "--gpu-architecture=sm_90a" in cuda_compile._options(key, 90)
    assert b"qrnn_layer" in cuda_compile.compiled_kernel(key, 90)


def test_shared_memory_of_every_variant_fits():
    """The plan's stages are what the source's layout of shared memory leaves room for."""
    for tile, chunks in itertools.product((64, 128), range(1, 8)):
        stages = layer_plan._stages(tile, chunks)
        used = chunks * 192 * 128 + stages * tile * 128 + tile * 128 + 2 * 64 * 4
        used += stages * 32 + 8 + (2 * stages + 10) * 8
        assert used + 1023 <= 232_448
