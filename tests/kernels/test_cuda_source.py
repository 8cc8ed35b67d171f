"""The CUDA source without a GPU: run as plain C++ on the host."""

from __future__ import annotations

import ctypes

import pytest
import torch

from qrnn_serve.core.errors import InputError
from qrnn_serve.kernels import cuda, plan, reference
from qrnn_serve.kernels.cuda_compile import KERNEL_CODES, KernelKey
from support.cuda_on_host import HOST_DTYPES
from support.pool_cases import SEQUENCES, assert_near, dense, forget_inputs, packed, pool_inputs


@pytest.fixture
def in_single_tiles(on_host, monkeypatch):
    """The same with every sequence cut into tiles that hand their state on, also short ones."""
    monkeypatch.setattr(plan, "_SHORT_TIMESTEPS", 0)
    monkeypatch.setattr(plan, "_AT_ONCE_TIMESTEPS", -1)
    plan.plan_scan.cache_clear()
    yield
    plan.plan_scan.cache_clear()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", HOST_DTYPES, ids=str)
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_kernels_on_the_host_match_reference(on_host, sequences, dtype, reverse):
    """Outputs and gradients of every kernel are those of the reference."""
    _assert_all_match(sequences, dtype, reverse)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sequences",
    [
        pytest.param(dense(200, 3, 5), id="dense-200x3x5"),
        pytest.param(dense(64, 2, 4), id="dense-64x2x4"),
        pytest.param(dense(2600, 1, 2), id="dense-2600x1x2"),
        pytest.param(packed(64, 0, 65, 63, 1, 128, 129, hidden=3), id="packed-tile-edges"),
        pytest.param(packed(0, 700, 0, 0, 9, 300, hidden=34), id="packed-uneven"),
        # Rows that allow wide copies, in whole channel tiles and in part of one.
        pytest.param(dense(200, 3, 64), id="dense-200x3x64"),
        pytest.param(dense(200, 3, 36), id="dense-200x3x36"),
        pytest.param(packed(0, 700, 0, 0, 9, 300, hidden=72), id="packed-uneven-aligned"),
        pytest.param(packed(*[2, 0, 66, 1] * 10, *[1, 3] * 120, hidden=8), id="packed-280x8"),
    ],
)
def test_tiles_hand_their_state_on(in_single_tiles, sequences, dtype, reverse):
    """Blocks that take one tile each find the state that the blocks before them left."""
    _assert_all_match(sequences, dtype, reverse)


def _assert_all_match(sequences, dtype, reverse):
    offsets = sequences.offsets("cpu", torch.int32 if reverse else torch.int64)
    f, x, h0 = forget_inputs(sequences, dtype)
    grad = torch.randn(sequences.shape()).to(dtype)
    wide = [t.double().requires_grad_() for t in (f, x, h0)]
    expected = reference.forget_mult(*wide, offsets, reverse)
    h = cuda.forget_mult(f, x, h0, offsets, reverse)
    got = [h, *cuda.forget_mult_backward(grad, f, x, h, h0, offsets, reverse)]
    want = [expected, *_gradients([expected], wide, [grad])]
    for output_gate in (True, False):
        gates, c0 = pool_inputs(sequences, dtype, output_gate)
        grads = [grad, torch.randn(c0.shape).to(dtype)]
        options = (offsets, output_gate, reverse, 0.3)
        wide = [t.double().requires_grad_() for t in (gates, c0)]
        expected = reference.fo_pool(*wide, *options)
        got += cuda.fo_pool(gates, c0, *options)
        got += cuda.fo_pool_backward(*grads, gates, c0, *options)
        want += [*expected, *_gradients(expected, wide, grads)]
        *outputs, starts = cuda.fo_pool_training(gates, c0, *options)
        assert all(map(torch.equal, outputs, got[-4:-2]))
        kept = cuda.fo_pool_backward(*grads, gates, c0, *options, starts)
        assert all(map(torch.equal, kept, got[-2:])), "states kept and computed again differ"

    for number, (value, expected_value) in enumerate(zip(got, want, strict=True)):
        assert value.is_contiguous()
        assert_near(value, expected_value, f"result {number}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tiles_keep_long_memory(in_single_tiles, dtype):
    """Constant gates near 0.002 over 10,000 timesteps stay right through 157 hand-overs."""
    fresh = torch.linspace(-2, 2, 33, dtype=torch.float64).expand(10_000, 1, 33)
    gates = torch.cat([fresh, torch.full_like(fresh, -6.2126)], dim=-1).to(dtype)
    expected = reference.fo_pool(gates.double(), output_gate=False)

    for value, want in zip(cuda.fo_pool(gates, output_gate=False), expected, strict=True):
        assert_near(value, want)


def test_tiles_keep_and_reset_the_state_exactly(in_single_tiles):
    """f of 0 keeps every bit of the state across tiles, and f of 1 drops what was before."""
    f = torch.zeros(200, 2, 5)
    f[0], f[150] = 1.0, 1.0
    x = torch.randn(200, 2, 5)

    h = cuda.forget_mult(f, x)

    assert torch.equal(h[:150], x[:1].expand(150, 2, 5))
    assert torch.equal(h[150:], x[150:151].expand(50, 2, 5))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_tiles_keep_bad_numbers_in_their_sequence(in_single_tiles, bad):
    """Infinity and NaN pass from tile to tile of one sequence only."""
    layout = packed(130, 200, 70, hidden=5)
    f, x, h0 = forget_inputs(layout, torch.float32)
    clean = cuda.forget_mult(f, x, h0, layout.offsets("cpu"))
    x[140] = bad

    spoilt = cuda.forget_mult(f, x, h0, layout.offsets("cpu"))

    assert torch.equal(clean[:140], spoilt[:140])
    assert torch.equal(clean[330:], spoilt[330:])
    assert not spoilt[140:330].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_give_the_bits_of_whole_sequences(on_host, monkeypatch, dtype):
    """However the work is shared, alone or packed, the same rows give the same bits."""
    layout = packed(300, 0, 65, 700, hidden=34)
    gates, c0 = pool_inputs(layout, dtype, True)
    whole = cuda.fo_pool(gates[365:, None], c0[3:])
    with monkeypatch.context() as patch:
        # Short enough for one block a sequence.
        patch.setattr(plan, "_SHORT_TIMESTEPS", 10_000)
        plan.plan_scan.cache_clear()
        uncut = cuda.fo_pool(gates, c0, layout.offsets("cpu"))
    plan.plan_scan.cache_clear()
    cut = cuda.fo_pool(gates, c0, layout.offsets("cpu"))

    assert all(map(torch.equal, cut, uncut))
    assert torch.equal(whole[0][:, 0], cut[0][365:])
    assert torch.equal(whole[1][0], cut[1][3])


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_short_kernels_give_the_bits_of_the_others(on_host, monkeypatch, dtype, reverse):
    """Few short sequences, alone or beside others, dense or packed: h, c and the kept states."""
    layout = packed(100, 0, 1, 20, hidden=40)
    options = (layout.offsets("cpu"), True, reverse, 0.2)
    gates, c0 = pool_inputs(layout, dtype, True)
    f, x, h0 = forget_inputs(layout, dtype)

    def run():
        alone = cuda.fo_pool_training(gates[:100, None], c0[:1], None, *options[1:])
        h = cuda.forget_mult(f, x, h0, options[0], reverse)
        return [*cuda.fo_pool_training(gates, c0, *options), *alone, h]

    short = run()
    monkeypatch.setattr(plan, "_AT_ONCE_TIMESTEPS", -1)
    plan.plan_scan.cache_clear()
    others = run()
    plan.plan_scan.cache_clear()

    for one, other in zip(short, others, strict=True):
        assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))
    assert torch.equal(short[0][:100], short[3][:, 0])


@pytest.mark.parametrize("offsets", [[5, 900], [0, 900, 400], [0, 400, 100, 900], [0, -7, 2000]])
def test_wrong_offsets_in_tiles_end_and_give_nan(in_single_tiles, offsets):
    """Blocks that wait for tiles which wrong offsets took away still come to an end."""
    gates, layout = torch.randn(900, 9), torch.tensor(offsets)

    _, c = cuda.fo_pool(gates, None, layout)

    assert c.isnan().any()


def test_rows_far_apart(on_host, monkeypatch):
    """Rows too far apart for short arithmetic run the kernel with long arithmetic."""
    gates, c0 = pool_inputs(dense(70, 2, 5), torch.float32, True)
    near = cuda.fo_pool(gates, c0)
    monkeypatch.setattr(cuda, "_FAR_BYTES", 0)

    far = cuda.fo_pool(gates, c0)

    assert all(map(torch.equal, near, far))


def test_left_out_tensors_on_the_host(on_host):
    """No state and no gradient mean zeros."""
    gates = torch.randn(5, 2, 12)
    zeros = torch.zeros(2, 4)
    options = (None, True, False, 0.0)

    assert all(
        map(torch.equal, cuda.fo_pool(gates, None, *options), cuda.fo_pool(gates, zeros, *options))
    )
    for grads in ((torch.randn(5, 2, 4), None), (None, torch.randn(2, 4))):
        full = [
            torch.zeros(shape) if g is None else g
            for g, shape in zip(grads, ((5, 2, 4), (2, 4)), strict=True)
        ]
        got = cuda.fo_pool_backward(*grads, gates, None, *options)
        want = cuda.fo_pool_backward(*full, gates, zeros, *options)
        assert all(map(torch.equal, got, want))


def test_starts_of_another_call_are_refused(on_host):
    """Kept states that do not fit are an error, since the kernel would read past their end."""
    gates, grad = torch.randn(70, 2, 12), torch.randn(70, 2, 4)
    starts = cuda.fo_pool_training(gates[:60], None, None, True, False, 0.0)[2]

    with pytest.raises(InputError, match=r"starts must be .*\[4, 8, 4\].*got \[2, 8, 4\]"):
        cuda.fo_pool_backward(grad, None, gates, None, None, True, False, 0.0, starts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_on_the_host(on_host, dtype):
    """Batch-major views and expanded gradients are read right."""
    gates = torch.randn(3, 7, 24).to(dtype).transpose(0, 1)[..., :12]
    c0 = torch.randn(4, 3).to(dtype).t()
    wide = [t.double().requires_grad_() for t in (gates, c0)]
    expected = reference.fo_pool(*wide)
    grads = [torch.ones(1, 1, 1).to(dtype).expand(7, 3, 4), torch.ones(1, 1).to(dtype).expand(3, 4)]

    got = [
        *cuda.fo_pool(gates, c0),
        *cuda.fo_pool_backward(*grads, gates, c0, None, True, False, 0.0),
    ]

    for value, want in zip(got, [*expected, *_gradients(expected, wide, grads)], strict=True):
        assert_near(value, want)


@pytest.mark.parametrize(
    "offsets", [[1, 5], [0, 9, 5], [0, 3, 1, 5], [-4, 2, 5], [0, 2, 4], [9, -9]]
)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_wrong_offsets_stay_inside_and_give_nan(on_host, offsets, reverse):
    """Kernels cannot refuse offsets, so those that are wrong write nowhere else and give NaN."""
    guard = 20
    memory = torch.full((guard + 5 + guard, 9), 7.0)
    gates = memory[guard : guard + 5]
    results = torch.full((guard + 5 + guard, 3), 7.0)
    layout = torch.tensor(offsets)
    sizes = cuda.PoolSizes(5, len(offsets) - 1, 3)
    c = torch.zeros(sizes.batch, 3)
    h = results[guard : guard + 5]
    call = cuda._Call(gates, sizes, layout, reverse, (gates,))
    plan = call.plan("qrnn_fo_pool")
    arguments = cuda._FO_POOL.pack(
        *(*call.head(plan), 0.0),
        *(*cuda.rows(gates), *cuda.state(None), *cuda.rows(h), *cuda.state(c), 0),
    )

    call.launch(plan, arguments)

    assert c.isnan().any()
    assert (results[:guard] == 7).all()
    assert (results[guard + 5 :] == 7).all()
    assert not (h == 7).any() or sorted(offsets) != offsets


def test_sequences_beside_a_bad_one_on_the_host(on_host):
    """NaN in one packed sequence reaches no other."""
    layout = packed(3, 4, 2, hidden=5)
    gates, c0 = pool_inputs(layout, torch.float32, True)
    clean = cuda.fo_pool(gates, c0, layout.offsets("cpu"))
    gates[3:7] = float("nan")

    spoilt = cuda.fo_pool(gates, c0, layout.offsets("cpu"))

    assert torch.equal(clean[0][:3], spoilt[0][:3])
    assert torch.equal(clean[0][7:], spoilt[0][7:])
    assert torch.equal(clean[1][[0, 2]], spoilt[1][[0, 2]])


@pytest.mark.parametrize("dtype", HOST_DTYPES, ids=str)
def test_every_kernel_fits_into_a_block_of_its_devices(host_kernels, dtype):
    """One channel a thread: the 64 kB of sm_75; two, from sm_80 on: the 99 kB of sm_86."""
    for channels, most in ((1, 64 * 1024), (2, 99 * 1024)):
        if channels > plan.widest_channels(dtype):
            continue
        library = host_kernels.built(KernelKey("qrnn_fo_pool", dtype, channels))
        for kernel in KERNEL_CODES:
            size = ctypes.c_uint.in_dll(library, f"{kernel}_shared_bytes").value
            assert size <= most, f"{kernel} needs {size} bytes"


def _gradients(outputs, leaves, grads):
    wide = [g.double() for g in grads]
    return torch.autograd.grad(outputs, leaves, wide, materialize_grads=True)
