"""Other precisions of a model: what int8 keeps, and that half converts inside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from qrnn_serve.core.errors import ConfigError, DTypeError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, HALF_RELATIVE_NORM
from qrnn_serve.model.precision import HALF, Int8Linear, convert, empty_model, precision_of
from support.closeness import max_abs, relative_norm
from support.exported import MODELS, make_model, random_batch

SOME = ("stack windows", "stack joined", "ids, every pooling, head", "head at every timestep")


@pytest.fixture(params=SOME)
def model(request):
    torch.manual_seed(1611)
    return make_model(MODELS[request.param])


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (64, 33)])
def test_int8_is_the_nearest_of_255_values(shape):
    """No entry is off by more than half a step of its own row; the largest is kept."""
    linear = nn.Linear(shape[1], shape[0]).requires_grad_(False)
    linear.weight.mul_(torch.logspace(-6, 6, shape[0]).unsqueeze(1))
    kept = Int8Linear.of(linear)
    step = kept.scale.double()

    error = (kept.weight.double() * step.unsqueeze(1) - linear.weight.double()).abs()

    assert kept.weight.dtype == torch.int8
    assert int(kept.weight.min()) >= -127
    assert (error <= step.unsqueeze(1) * 0.5001).all()
    torch.testing.assert_close(step * 127, linear.weight.double().abs().amax(1), rtol=1e-6, atol=0)


def test_int8_of_a_row_of_zeros_is_zero():
    """There is nothing to divide by."""
    linear = nn.Linear(3, 2).requires_grad_(False)
    linear.weight[0] = 0

    kept = Int8Linear.of(linear)

    assert not kept.weight[0].any()
    assert kept(torch.ones(1, 3))[0, 0] == linear.bias[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_int8_of_weights_that_are_not_finite_is_refused(bad):
    """They would become some number."""
    linear = nn.Linear(3, 2).requires_grad_(False)
    linear.weight[1, 1] = bad

    with pytest.raises(ConfigError, match="NaN or infinity"):
        Int8Linear.of(linear)


def test_int8_computes_with_its_weights_multiplied_out(model):
    """The same numbers as a float64 model whose weights are the int8 ones times their scales."""
    kept = convert(model, "int8")
    weights = kept.state_dict()
    wide = empty_model(model.config, "float64")
    multiplied = {
        name: tensor.double() * weights[name.replace("weight", "scale")].double().unsqueeze(1)
        if tensor.dtype == torch.int8
        else tensor.double()
        for name, tensor in weights.items()
        if not name.endswith(".scale")
    }
    wide.load_state_dict(multiplied, assign=True)
    batch = random_batch(model, [9, 0, 4, 1], 9, with_state=True)
    inputs = [t.double() if t.is_floating_point() else t for t in (batch.input, batch.state)]

    with torch.inference_mode():
        got = kept(batch.input, batch.lengths, batch.state)
        want = wide(inputs[0], batch.lengths, inputs[1])

    assert [t.dtype for t in got] == [torch.float32] * 2
    for actual, expected in zip(got, want, strict=True):
        assert max_abs(actual, expected) <= FLOAT32_MAX_ABS


@pytest.mark.parametrize("precision", HALF)
def test_half_takes_and_gives_float32(model, precision):
    """Padded or packed, the numbers of the bare half module, and near those of float64."""
    half = convert(model, precision)
    bare = convert(model, precision)
    bare.float32_edges = False
    wide = convert(half, "float64")
    batch = random_batch(model, [9, 2, 4, 1], 9, with_state=True)
    dtype = getattr(torch, precision)
    rounded = batch.input if model.takes_ids else batch.input.to(dtype)
    real = torch.arange(9) < batch.lengths[:, None]
    offsets = torch.tensor([0, 9, 11, 15, 16])

    with torch.inference_mode():
        got = half(batch.input, batch.lengths, batch.state)
        packed, _ = half.forward_packed(batch.input[real], offsets, batch.state)
        inside = bare(rounded, batch.lengths, batch.state.to(dtype))
        exact = wide(
            rounded if model.takes_ids else rounded.double(),
            batch.lengths,
            batch.state.to(dtype).double(),
        )

    for actual, same, expected in zip(got, inside, exact, strict=True):
        assert actual.dtype == torch.float32
        assert torch.equal(actual, same.float())
        # The contract is for one product and one pool; here they follow each other.
        deep = len(model.config.qrnn.layers) + (model.head is not None)
        assert relative_norm(actual, expected) <= deep * HALF_RELATIVE_NORM[precision]
    assert torch.equal(packed, got[0] if model.pooling != "none" else got[0][real])


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", "float64"])
def test_scripted_gives_the_same_bits(model, precision):
    """TorchScript sees the types inside as eager torch does."""
    converted = convert(model, precision)
    scripted = torch.jit.script(converted)
    batch = random_batch(
        convert(model, "float64") if precision == "float64" else model, [3, 5], 5, with_state=True
    )

    want = converted(batch.input, batch.lengths, batch.state)
    got = scripted(batch.input, batch.lengths, batch.state)

    for actual, expected in zip(got, want, strict=True):
        assert torch.equal(actual, expected)
    assert scripted.state_dict().keys() == converted.state_dict().keys()


def test_conversion_leaves_the_model_alone_and_shares_what_stays(model):
    """Names, dtypes and bytes of the first model; no copy of what does not change."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = convert(model, "int8")
    same = convert(model, "float32")

    assert (precision_of(model), precision_of(kept)) == ("float32", "int8")
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(t.data_ptr() == after[n].data_ptr() for n, t in same.state_dict().items())
    if model.takes_ids:
        assert kept.state_dict()["embedding.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("float64", "int8", "expected a float32 model, got float64"),
        ("int8", "float16", "float weights are lost"),
        ("int8", "int8", "expected a float32 model, got int8"),
    ],
)
def test_conversions_that_make_no_sense_are_refused(before, after, message):
    """The message says what is missing."""
    model = convert(make_model(MODELS["stack one"]), before)

    with pytest.raises(ConfigError, match=message):
        convert(model, after)


def test_half_refuses_half_input():
    """The message names the type at the edge, not that of the weights."""
    half = convert(make_model(MODELS["stack one"]), "bfloat16")

    with pytest.raises(DTypeError, match="expected float32 like the model, got bfloat16"):
        half(torch.zeros(1, 2, 4, dtype=torch.bfloat16))


def test_int8_moves_and_keeps_its_scales():
    """The parts of the state dict are the weights' own, and load into a model without memory."""
    kept = convert(make_model(MODELS["head without bias"]), "int8")
    names = {"weight": torch.int8, "scale": torch.float32}
    loaded = empty_model(kept.config, "int8")
    loaded.load_state_dict(kept.state_dict(), assign=True)

    assert {n: kept.state_dict()[f"head.{n}"].dtype for n in names} == names
    values = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 3, 4), np.float32))
    assert torch.equal(loaded(values)[0], kept(values)[0])
