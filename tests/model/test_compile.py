"""torch.compile takes the dense path as one graph, forward and backward, for any T and B."""

from __future__ import annotations

import pytest
import torch

from qrnn_serve import QRNN, SequenceModel
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.model.config import SequenceModelConfig
from support.closeness import max_abs
from support.stacks import STACKS

BACKENDS = [
    # Traces forward and backward graphs and runs them without a compiler.
    pytest.param("cpu", "aot_eager", id="cpu-aot_eager"),
    pytest.param("cuda", "inductor", marks=pytest.mark.gpu, id="cuda-inductor"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Graphs of one test never serve another."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
@pytest.mark.parametrize("name", STACKS)
def test_dense_call_is_one_graph(name, device, backend):
    """fullgraph=True; outputs, state and gradients as eager, with and without a state."""
    module = QRNN.from_config(STACKS[name], device=device).eval()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x = torch.randn(5, 2, module.input_size, device=device)

    for hidden in (None, module.initial_state(2)):
        results = []
        for call in (module, compiled):
            module.zero_grad()
            output, state = call(x, hidden)
            output.square().sum().backward()
            parts = list(state) if hidden is None else [*state.cells, *state.inputs]
            results.append([output, *parts, *(p.grad.clone() for p in module.parameters())])

        for eager, got in zip(*results, strict=True):
            assert max_abs(got, eager) <= FLOAT32_MAX_ABS


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_sizes_may_change(device, backend):
    """One compiled module takes other T and B, T = 1 too."""
    module = QRNN.from_config(STACKS["windows"], device=device).eval()
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)

    for timesteps, batch in ((5, 2), (9, 3), (1, 1), (4, 7)):
        x = torch.randn(timesteps, batch, 3, device=device)
        assert max_abs(compiled(x)[0], module(x)[0]) <= FLOAT32_MAX_ABS


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_lengths_work_in_a_compiled_module(device, backend):
    """Lengths are read on the host, so the graph breaks there, and the numbers stay the same."""
    module = QRNN.from_config(STACKS["joined"], device=device).eval()
    compiled = torch.compile(module, backend=backend)
    x, lengths = torch.randn(5, 3, 3, device=device), torch.tensor([5, 0, 2])

    assert (
        max_abs(compiled(x, lengths=lengths)[0], module(x, lengths=lengths)[0]) <= FLOAT32_MAX_ABS
    )


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
@pytest.mark.parametrize("ids", [False, True])
def test_packed_scoring_is_one_graph(ids, device, backend):
    """SequenceModel.forward_packed compiles without a break: nothing in it reads a value."""
    config = SequenceModelConfig(
        qrnn=STACKS["joined"],
        vocabulary_size=7 if ids else None,
        pooling="last_max_mean",
        head_size=2,
    )
    model = SequenceModel(config, device=device).eval()
    values = torch.randint(0, 7, (8,)) if ids else torch.randn(8, 3)
    values, offsets = values.to(device), torch.tensor([0, 5, 5, 8], device=device)

    compiled = torch.compile(model.forward_packed, fullgraph=True, backend=backend)
    output, state = compiled(values, offsets)

    expected, expected_state = model.forward_packed(values, offsets)
    assert max_abs(output, expected) <= FLOAT32_MAX_ABS
    assert max_abs(state, expected_state) <= FLOAT32_MAX_ABS
