"""qrnn::linear_fo_pool: its arguments everywhere, its numbers on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qrnn_serve.core.errors import DTypeError, InputError
from qrnn_serve.kernels import cuda_layer, reference
from qrnn_serve.kernels.ops import linear_fo_pool
from qrnn_serve.model.window import window_columns
from support.pool_cases import HALF_DTYPES, assert_near


def _no_hopper():
    return not torch.cuda.is_available() or (
        torch.cuda.get_device_capability() != cuda_layer.ARCHITECTURE
    )


on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(_no_hopper(), reason="needs a GPU of compute capability 9.0"),
]
hopper = pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_hopper)])


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Replaces the poisoned memory of the other tests: matrix products object to it."""


def arguments(lengths, inputs, hidden, dtype, *, packed=False, window=1):
    """Random arguments on the CPU."""
    batch = len(lengths)
    shape = (sum(lengths), inputs) if packed else (lengths[0], batch, inputs)
    columns = window * inputs
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return {
        "x": torch.randn(shape).to(dtype),
        "weight": (torch.randn(3 * hidden, columns) / columns**0.5).to(dtype),
        "bias": (torch.randn(3 * hidden) * 0.3).to(dtype),
        "c0": torch.randn(batch, hidden).to(dtype),
        "offsets": bounds if packed else None,
        "previous": torch.randn(batch, window - 1, inputs).to(dtype),
    }


def expected_of(given, reverse=False, zoneout=0.0):
    """The reference on the same rounded inputs, in float64."""
    x, weight, bias, c0, previous = (
        given[name].double() for name in ("x", "weight", "bias", "c0", "previous")
    )
    offsets = given["offsets"]
    columns = window_columns(x, offsets, previous, 1 + previous.shape[1], reverse)[0]
    return reference.fo_pool(F.linear(columns, weight, bias), c0, offsets, True, reverse, zoneout)


def on(device, given):
    """The arguments on a device."""
    return {name: None if value is None else value.to(device) for name, value in given.items()}


def assert_matches(given, device, **options):
    """Every element is written, and right."""
    results = linear_fo_pool(**on(device, given), **options)
    for got, expected in zip(results, expected_of(given, **options), strict=True):
        assert not got.isnan().any()
        assert_near(got, expected)


@hopper
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("timesteps", "batch", "inputs", "hidden"),
    [
        (1, 1, 8, 1),
        (2, 3, 64, 31),
        (64, 2, 64, 64),
        (65, 2, 72, 65),
        (127, 5, 320, 320),
        (129, 7, 320, 300),
        (300, 30, 384, 64),
        (70, 301, 200, 41),
        (33, 40, 256, 640),
    ],
)
def test_dense_matches_reference(device, dtype, timesteps, batch, inputs, hidden):
    """Tile edges in time, channels and columns, many sequences and few."""
    assert_matches(arguments([timesteps] * batch, inputs, hidden, dtype), device)


@hopper
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_matches_reference(device, offset_dtype, window, reverse):
    """Uneven lengths, empty ones and ones shorter than the window, with what came before."""
    lengths = [5, 0, 1, 700, 128, 129, 64, 0, 333, 2, 127] * 4
    given = arguments(lengths, 72, 70, torch.float16, packed=True, window=window)
    given["offsets"] = given["offsets"].to(offset_dtype)
    assert_matches(given, device, reverse=reverse, zoneout=0.25)


@hopper
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_long_memory(device, dtype):
    """f near 0.002 over 10,000 timesteps stays within the contract."""
    given = arguments([10_000] * 2, 64, 64, dtype)
    given["weight"][64:128] *= 0.1
    given["bias"][64:128] = -6.2
    assert_matches(given, device)


@hopper
def test_f_exactly_zero_keeps_the_state(device):
    """With zoneout 1 the state before is the state after, bit for bit."""
    given = on(device, arguments([200] * 3, 64, 65, torch.bfloat16))
    assert torch.equal(linear_fo_pool(**given, zoneout=1.0)[1], given["c0"])


@hopper
def test_what_may_be_left_out(device):
    """No bias, no state and no previous inputs are zeros."""
    given = arguments([90] * 3, 40, 33, torch.float16, window=2)
    for name in ("bias", "c0", "previous"):
        given[name].zero_()
    expected = linear_fo_pool(**on(device, given))

    got = linear_fo_pool(given["x"].to(device), given["weight"].to(device))

    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@hopper
def test_strides_and_alignment(device):
    """Views whose rows start anywhere give what a contiguous copy gives."""
    given = on(device, arguments([90] * 3, 64, 64, torch.float16))
    expected = linear_fo_pool(**given)
    wide = torch.zeros(3, 90, 67, dtype=torch.float16, device=device)
    wide[:, :, 3:] = given["x"].transpose(0, 1)

    got = linear_fo_pool(**{**given, "x": wide[:, :, 3:].transpose(0, 1)})

    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@hopper
def test_a_bad_sequence_stays_alone(device):
    """Infinities and NaN in one sequence change no bit of another."""
    given = on(device, arguments([100, 70, 129, 40], 64, 70, torch.float16, packed=True))
    clean = linear_fo_pool(**given)
    given["x"][100:170:3] = float("inf")
    given["x"][101:170:3] = float("nan")

    spoilt = linear_fo_pool(**given)

    for rows in (slice(0, 100), slice(170, None)):
        assert torch.equal(clean[0][rows], spoilt[0][rows])
    assert torch.equal(clean[1][[0, 2, 3]], spoilt[1][[0, 2, 3]])


@hopper
@pytest.mark.parametrize(
    ("offsets", "bad"),
    [
        ([0, 50, 40, 200], [1, 2]),
        ([0, 90, 300, 200], [1, 2]),
        ([5, 90, 100, 200], [0]),
        ([0, 90, 100, 150], [2]),
        ([0, -7, 100, 200], [0, 1, 2]),
    ],
)
def test_wrong_offsets_give_nan(device, offsets, bad):
    """Sequences with wrong offsets end in NaN and reach no memory outside."""
    given = on(device, arguments([90, 10, 100], 64, 65, torch.bfloat16, packed=True))
    given["offsets"] = torch.tensor(offsets, device=device)

    c = linear_fo_pool(**given)[1]

    assert c[bad].isnan().all()


@hopper
def test_graph_capture(device):
    """One capture replays on new numbers and offsets."""
    given = on(device, arguments([30, 0, 190, 40], 64, 65, torch.float16, packed=True))
    linear_fo_pool(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = linear_fo_pool(**given)

    for lengths in ((30, 0, 190, 40), (260, 0, 0, 0), (1, 5, 5, 249)):
        given["x"].copy_(torch.randn(given["x"].shape))
        given["offsets"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(results, linear_fo_pool(**given), strict=True):
            assert torch.equal(got, expected)


@hopper
def test_no_gradient(device):
    """Backward is an error that says what to use."""
    given = on(device, arguments([9] * 2, 8, 4, torch.float16))
    h, _ = linear_fo_pool(**{**given, "weight": given["weight"].requires_grad_()})

    with pytest.raises(InputError, match="for inference and has no gradient"):
        h.sum().backward()


def test_shapes_of_a_fake_call():
    """The fake implementation gives the shapes of the real one."""
    given = on("meta", arguments([9, 4], 16, 5, torch.float16, packed=True, window=2))

    h, c = linear_fo_pool(**given)

    assert h.shape == (13, 5)
    assert c.shape == (2, 5)
    assert h.dtype == c.dtype == torch.float16


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(9, 2, 16)}, DTypeError, "x must be float16 or bfloat16"),
        ({"x": torch.zeros(9, 2, 15).half()}, InputError, "I must be a multiple of 8, got 15"),
        ({"weight": torch.zeros(15, 20).half()}, InputError, r"weight must be \[3\*H, window\*I\]"),
        ({"weight": torch.zeros(14, 16).half()}, InputError, r"weight must be \[3\*H, window\*I\]"),
        ({"bias": torch.zeros(5).half()}, InputError, r"bias must be \[15\], got \[5\]"),
        ({"c0": torch.zeros(2, 4).half()}, InputError, r"c0 must be \[B, H\] = \[2, 5\]"),
        ({"previous": torch.zeros(2, 1, 16).half()}, InputError, r"previous must be \[2, 0, 16\]"),
        ({"zoneout": 1.5}, InputError, "zoneout must be from 0 to 1"),
        ({"c0": torch.zeros(2, 5).bfloat16()}, DTypeError, "c0 and x must have one dtype"),
    ],
)
def test_arguments_that_do_not_fit(changes, error, message):
    """Every argument is checked by name."""
    given = {**arguments([9] * 2, 16, 5, torch.float16), **changes}
    given = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }

    with pytest.raises(error, match=f"linear_fo_pool: {message}"):
        linear_fo_pool(**given)
