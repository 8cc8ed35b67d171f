"""The whole model: padded, packed and by hand agree; bad input is an error before it is used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qrnn_serve import SequenceModel
from qrnn_serve.core.errors import DTypeError, InputError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, GOLDEN_FLOAT64_MAX_ABS
from qrnn_serve.model.config import LayerConfig, QRNNConfig, SequenceModelConfig
from qrnn_serve.model.pooling import pool_packed
from qrnn_serve.model.state import state_layout
from support.closeness import max_abs
from support.devices import DEVICES
from support.qrnn_loop import loop_stack, state_row, weights_of
from support.stacks import STACKS, pad
from support.whole_models import MODELS, POOLINGS, offsets_of, random_input

LENGTHS = [4, 0, 1, 9, 2]


def pooled_by_hand(config, output):
    """One row's output [T, C] pooled as the words say."""
    if config.pooling == "none":
        return output
    if len(output) == 0:
        return torch.zeros(config.pooled_size, dtype=output.dtype)
    half = output.shape[1] // config.qrnn.num_directions
    parts = {
        "last": torch.cat([output[-1, :half], output[0, half:]]),
        "max": output.amax(0),
        "mean": output.sum(0) / len(output),
    }
    names = config.pooling.split("_")
    return torch.cat([parts[name] for name in names])


def activated(x, name):
    """The activation written out."""
    return {
        "none": lambda: x,
        "relu": lambda: np.maximum(x, 0),
        "hardtanh": lambda: np.clip(x, -1, 1),
        "sigmoid": lambda: 1 / (1 + np.exp(-x)),
    }[name]()


def by_hand(model, row):
    """Output and state of one row: lookup, float64 loop, pooling and head written out."""
    config, weights = model.config, weights_of(model)
    values = row.double().numpy()
    if config.takes_ids:
        values = weights["embedding.weight"][row.numpy()]
    if config.ids_per_timestep > 1:
        values = (values * (row.numpy() != config.padding_id)[..., None]).sum(1)
    values = activated(values, config.input_activation)
    qrnn = {k.removeprefix("qrnn."): w for k, w in weights.items() if k.startswith("qrnn.")}
    output, after = loop_stack(config.qrnn, qrnn, values)
    pooled = pooled_by_hand(config, torch.from_numpy(output)).numpy()
    pooled = activated(pooled, config.pooled_activation)
    for number in range(len(config.head_hidden_sizes)):
        name = f"head_hidden.{number}"
        pooled = pooled @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        pooled = activated(pooled, "relu")
    if config.head_size is not None:
        pooled = pooled @ weights["head.weight"].T
        pooled = pooled + weights["head.bias"] if config.head_bias else pooled
    pooled = activated(pooled, config.output_activation)
    return torch.from_numpy(pooled), state_row(config.qrnn, after)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, GOLDEN_FLOAT64_MAX_ABS), (torch.float32, FLOAT32_MAX_ABS)],
)
@pytest.mark.parametrize("name", MODELS)
def test_padded_and_packed_equal_each_row_by_hand(name, dtype, tolerance, device):
    """Output and state of uneven rows, an empty one too; padding is exactly 0, whatever it held."""
    config = MODELS[name]
    model = SequenceModel(config, dtype=dtype).eval()
    rows = random_input(config, LENGTHS, dtype)
    expected = [by_hand(model, row) for row in rows]
    fill = -5 if config.takes_ids else float("nan")
    model.to(device)

    padded, padded_state = model(
        pad(rows, fill=fill, batch_first=True).to(device), torch.tensor(LENGTHS)
    )
    packed, packed_state = model.forward_packed(
        torch.cat(rows).to(device), offsets_of(rows).to(device)
    )

    states = torch.stack([state for _, state in expected])
    assert max_abs(padded_state, states) <= tolerance
    assert max_abs(packed_state, states) <= tolerance
    outputs = [output for output, _ in expected]
    if config.pooling == "none":
        assert max_abs(packed, torch.cat(outputs)) <= tolerance
        assert max_abs(padded, pad(outputs, batch_first=True)) <= tolerance
        for b, length in enumerate(LENGTHS):
            assert not padded[b, length:].any()
    else:
        assert max_abs(packed, torch.stack(outputs)) <= tolerance
        assert max_abs(padded, torch.stack(outputs)) <= tolerance
    assert padded.shape[-1] == config.output_size


@pytest.mark.parametrize("name", MODELS)
def test_without_lengths_every_row_has_all_timesteps(name):
    """No lengths is the same as lengths of T, bit for bit."""
    config = MODELS[name]
    model = SequenceModel(config).eval()
    batch = torch.stack(random_input(config, [5, 5, 5]))

    plain = model(batch)
    with_lengths = model(batch, torch.tensor([5, 5, 5]))

    assert all(torch.equal(a, b) for a, b in zip(plain, with_lengths, strict=True))


@pytest.mark.parametrize("name", [n for n in MODELS if n.startswith(("windows", "no_bias"))])
@settings(max_examples=15, deadline=None)
@given(cut=st.integers(0, 7), seed=st.integers(0, 999))
def test_state_carries_a_row_on(name, cut, seed):
    """Two chunks with the state between them end in the state of one call; zeros are no state."""
    torch.manual_seed(seed)
    config = MODELS[name]
    model = SequenceModel(config, dtype=torch.float64).eval()
    batch = torch.stack(random_input(config, [7, 7], torch.float64))
    whole, whole_state = model(batch, None, torch.zeros(2, model.state_size, dtype=torch.float64))

    first, state = model(batch[:, :cut])
    second, last = model(batch[:, cut:], None, state)

    assert torch.equal(whole, model(batch)[0])
    assert max_abs(last, whole_state) <= GOLDEN_FLOAT64_MAX_ABS
    if config.pooling == "none":
        assert max_abs(torch.cat([first, second], dim=1), whole) <= GOLDEN_FLOAT64_MAX_ABS


def test_state_columns_lie_where_the_layout_says():
    """The cell slice of the last forward layer without output gate is its last output."""
    config = SequenceModelConfig(
        qrnn=QRNNConfig(
            input_size=3,
            layers=(
                LayerConfig(hidden_size=4, window=3),
                LayerConfig(hidden_size=5, output_gate=False),
            ),
            bidirectional="per_layer",
        )
    )
    model = SequenceModel(config).eval()
    x = torch.randn(2, 6, 3)

    output, state = model(x)

    slices = {
        (p.layer, p.direction, p.kind): state[:, p.start : p.stop]
        for p in state_layout(config.qrnn)
    }
    assert torch.equal(slices[1, "forward", "cell"], output[:, -1, :5])
    assert torch.equal(slices[1, "backward", "cell"], output[:, 0, 5:])
    assert torch.equal(slices[0, "forward", "inputs"], x[:, 4:].flatten(1))
    assert torch.equal(slices[0, "backward", "inputs"], x[:, :2].flip(1).flatten(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pooling", POOLINGS[1:])
def test_a_row_pools_to_the_same_bits_in_any_company(pooling, device):
    """Pooling one row alone and among neighbours, NaN and infinite ones too, is bit-identical."""
    rows = [torch.randn(length, 6, device=device) for length in (1, 700, 0, 33)]
    bad = [*rows, torch.full((4, 6), float("nan"), device=device)]
    bad[0] = torch.full_like(rows[0], float("inf"))

    pooled = pool_packed(torch.cat(bad), offsets_of(bad).to(device), pooling, 2)

    for b in (1, 2, 3):
        alone = pool_packed(rows[b], offsets_of([rows[b]]).to(device), pooling, 2)
        assert torch.equal(pooled[b], alone[0])
    assert pooled[4].isnan().all()
    assert torch.equal(pooled[2], torch.zeros_like(pooled[2]))


@pytest.mark.parametrize("device", DEVICES)
def test_mean_of_a_long_row_does_not_drift(device):
    """10,000 equal values: adding them one by one in float32 is off by 1e-4."""
    values = torch.full((10_000, 2), 0.7, device=device)

    mean = pool_packed(values, torch.tensor([0, 10_000], device=device), "mean", 1)

    assert max_abs(mean.cpu(), torch.full((1, 2), 0.7)) <= FLOAT32_MAX_ABS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pooling", POOLINGS[1:])
def test_pooling_gradcheck(pooling, device):
    """Gradients of every pooling, an empty row among the rows."""
    values = torch.randn(6, 4, dtype=torch.float64, device=device, requires_grad=True)
    offsets = torch.tensor([0, 3, 3, 6], device=device)

    assert torch.autograd.gradcheck(lambda v: pool_packed(v, offsets, pooling, 2), (values,))


@pytest.mark.parametrize("name", MODELS)
def test_no_rows_and_no_timesteps(name):
    """B = 0 and T = 0 in all combinations keep every axis; an empty row gives the head of zeros."""
    config = MODELS[name]
    model = SequenceModel(config).eval()
    for batch, timesteps in ((0, 3), (2, 0), (0, 0)):
        shape = (batch, timesteps, *config.timestep_shape)
        x = torch.zeros(shape, dtype=torch.int64 if config.takes_ids else torch.float32)

        output, state = model(x)

        middle = (timesteps,) if config.pooling == "none" else ()
        assert output.shape == (batch, *middle, config.output_size)
        assert state.shape == (batch, model.state_size)
        assert not state.any()


def features(**config):
    return SequenceModel(SequenceModelConfig(qrnn=STACKS["one"], **config)).eval()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (torch.randn(2, 3, 5),),
            InputError,
            r"features \[batch, time, 4\], got shape \[2, 3, 5\]",
        ),
        ((torch.randn(2, 4),), InputError, r"features \[batch, time, 4\], got shape \[2, 4\]"),
        (
            (torch.randn(2, 3, 4).double(),),
            DTypeError,
            "expected float32 like the model, got float64",
        ),
        ((torch.zeros(2, 3, 4).long(),), DTypeError, "got int64"),
        ((torch.randn(2, 3, 4, device="meta"),), InputError, "on meta and the model on cpu"),
        ((torch.randn(2, 3, 4), torch.tensor([3])), InputError, r"lengths.*\[2\]"),
        ((torch.randn(2, 3, 4), torch.tensor([3, 4])), InputError, "lengths: got 4.*3 timesteps"),
        (
            (torch.randn(2, 3, 4), None, torch.zeros(3, 4)),
            InputError,
            r"state: expected \[batch, state\] = \[2, 4\], got \[3, 4\]",
        ),
        ((torch.randn(2, 3, 4), None, torch.zeros(2, 5)), InputError, r"got \[2, 5\]"),
        (
            (torch.randn(2, 3, 4), None, torch.zeros(2, 4).double()),
            DTypeError,
            "state: expected float32.*got float64",
        ),
    ],
)
def test_wrong_features_are_named(arguments, error, message):
    """Rank, width, dtype, device, lengths and state: expected and got, eager as scripted."""
    with pytest.raises(error, match=message):
        features()(*arguments)
    with pytest.raises(torch.jit.Error, match=message):
        torch.jit.script(features())(*arguments)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([[0, 11]]), InputError, "ids from 0 to 10, got 0 to 11"),
        (torch.tensor([[-1, 3]]), InputError, "ids from 0 to 10, got -1 to 3"),
        (torch.tensor([0, 1]), InputError, r"ids \[batch, time\], got shape \[2\]"),
        (torch.tensor([[0, 1]], dtype=torch.int32), DTypeError, "int64 ids, got int32"),
        (torch.tensor([[0.0, 1.0]]), DTypeError, "int64 ids, got float32"),
    ],
)
def test_wrong_ids_are_named(ids, error, message):
    """C23: an id out of range is found on the host, not by a device."""
    with pytest.raises(error, match=message):
        features(vocabulary_size=11)(ids)


@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 2), (2, 5, 3, 1)])
def test_wrong_shapes_of_several_ids_are_named(shape):
    """Several ids a timestep are one axis more, of a fixed width; eager as scripted."""
    model = features(vocabulary_size=11, ids_per_timestep=3)
    for call in (model, torch.jit.script(model)):
        with pytest.raises(
            (InputError, torch.jit.Error), match=r"ids \[batch, time, 3\], got shape"
        ):
            call(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ([0, 2, 4], InputError, "0 to the input's 5 timesteps, got 0 to 4"),
        ([1, 2, 5], InputError, "got 1 to 5"),
        ([0, 4, 3, 5], InputError, "rising all the way: False"),
        ([], InputError, r"shape \[batch \+ 1\], got \[0\]"),
        ([0.0, 5.0], DTypeError, "int64, got float32"),
    ],
)
def test_wrong_offsets_are_named(offsets, error, message):
    """Offsets in CPU memory are checked before they index anything."""
    dtype = torch.float32 if error is DTypeError else torch.int64
    with pytest.raises(error, match=message):
        features().forward_packed(torch.randn(5, 4), torch.tensor(offsets, dtype=dtype))


def test_padding_id_is_not_trained():
    """The embedding of the padding id gets no gradient; the others do."""
    model = SequenceModel(
        SequenceModelConfig(qrnn=STACKS["one"], vocabulary_size=5, padding_id=2, pooling="mean")
    )
    output, _ = model(torch.tensor([[0, 2, 3]]))
    output.sum().backward()

    assert not model.embedding.weight.grad[2].any()
    assert model.embedding.weight.grad[0].any()


@pytest.mark.gpu
def test_packed_scoring_can_be_captured_in_a_cuda_graph():
    """Nothing in forward_packed waits for the stream; a replay on new values equals eager."""
    config = SequenceModelConfig(qrnn=STACKS["joined"], pooling="last_max_mean", head_size=3)
    model = SequenceModel(config, device="cuda").eval()
    offsets = torch.tensor([0, 5, 5, 8], device="cuda")
    values = torch.randn(8, 3, device="cuda")
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model.forward_packed(values, offsets)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, state = model.forward_packed(values, offsets)
        values.copy_(torch.randn(8, 3))
        graph.replay()

        expected, expected_state = model.forward_packed(values, offsets)
        assert max_abs(output, expected) <= FLOAT32_MAX_ABS
        assert max_abs(state, expected_state) <= FLOAT32_MAX_ABS
