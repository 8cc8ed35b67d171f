"""Several devices: the batch axis is split, never time; values are compared, not shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qrnn_serve import QRNN
from qrnn_serve.core.errors import InputError
from qrnn_serve.core.tolerances import GOLDEN_FLOAT64_MAX_ABS, SAME_ROWS_FLOAT32_MAX_ABS
from qrnn_serve.model.state import QRNNState
from support.closeness import max_abs
from support.stacks import STACKS, pad, random_rows


def split(value, parts, dim):
    """What DataParallel(dim) hands to each replica: tensors cut on that axis, lists by member."""
    if isinstance(value, torch.Tensor):
        return value.chunk(parts, dim)
    cut = [split(member, parts, dim) for member in value]
    kind = QRNNState if isinstance(value, QRNNState) else lambda *members: list(members)
    return [kind(*members) for members in zip(*cut, strict=True)]


def join(values, dim):
    """What DataParallel(dim) makes of the replicas' results."""
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values, dim)
    kind = QRNNState if isinstance(values[0], QRNNState) else lambda *members: list(members)
    return kind(*[join(list(members), dim) for members in zip(*values, strict=True)])


def flat(value):
    """Every tensor in a result."""
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in flat(v)]


@pytest.mark.parametrize("name", STACKS)
def test_splitting_the_batch_axis_changes_no_value(name):
    """C06: cut on axis 1, with both kinds of state and lengths, output and state are the same."""
    module = QRNN.from_config(STACKS[name], dtype=torch.float64).eval()
    x = pad(random_rows([6, 2, 5, 3], module.input_size))
    lengths = torch.tensor([[6, 2, 5, 3]])
    start = QRNNState(*[[torch.randn_like(t) for t in part] for part in module.initial_state(4)])

    for hidden in (start.cells, start):
        whole = module(x, hidden, lengths=lengths)
        replicas = [
            module(*arguments)
            for arguments in zip(*[split(v, 2, 1) for v in (x, hidden, lengths)], strict=True)
        ]
        joined = join([list(r) for r in replicas], 1)

        pairs = zip(flat(list(whole)), flat(joined), strict=True)
        assert all(max_abs(a, b) <= GOLDEN_FLOAT64_MAX_ABS for a, b in pairs)


def test_splitting_the_time_axis_is_seen_in_the_values():
    """C06: cut on axis 0 the shapes fit and the numbers are wrong: values must be compared."""
    module = QRNN(3, 4, 2).eval()
    x = torch.randn(6, 4, 3)

    whole, _ = module(x)
    wrong = torch.cat([module(part)[0] for part in x.chunk(2, 0)])

    assert wrong.shape == whole.shape
    assert max_abs(wrong, whole) > 1e-3


def test_a_replica_refuses_to_remember():
    """Memory kept by a DataParallel replica would be lost without a word, so it is an error."""
    module = QRNN(3, 4, window=2, save_prev_x=True)
    replica = module.layers[0]._replicate_for_data_parallel()
    replica.linear = module.layers[0].linear

    with pytest.raises(InputError, match=r"DataParallel replica.*QRNNState"):
        replica(torch.randn(2, 2, 3))


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("batch", [1, 5, 8])
@pytest.mark.parametrize("name", ["no_bias", "windows", "joined"])
def test_data_parallel_on_two_gpus_equals_one(name, batch):
    """DataParallel(dim=1), B odd and below the number of GPUs: output, state and gradients."""
    module = QRNN.from_config(STACKS[name], device="cuda:0")
    parallel = nn.DataParallel(module, device_ids=[0, 1], dim=1)
    x = torch.randn(7, batch, module.input_size, device="cuda:0")
    lengths = torch.randint(0, 8, (1, batch))
    state = module.initial_state(batch)

    results = []
    for model in (module, parallel):
        module.zero_grad()
        output, after = model(x, state, lengths.cuda() if model is parallel else lengths)
        output.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in module.parameters()]
        results.append([output, *after.cells, *after.inputs, *gradients])

    for one, two in zip(*results, strict=True):
        # Layers of window 1 carry inputs of width 0.
        scale = max(1.0, one.abs().max().item()) if one.numel() else 1.0
        assert max_abs(two, one) <= SAME_ROWS_FLOAT32_MAX_ABS * scale


TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from qrnn_serve import QRNN

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
data = torch.load(folder + "/data.pt", weights_only=True)
module = QRNN(3, 4, 2, window=2, bidirectional=True, dtype=torch.float64)
module.load_state_dict(data["weights"])
model = nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
half = slice(2 * rank, 2 * rank + 2)
for _ in range(2):
    output, _ = model(data["x"][:, half], lengths=data["lengths"][half])
    optimizer.zero_grad()
    output.square().sum().backward()
    optimizer.step()
if rank == 0:
    torch.save(module.state_dict(), folder + "/after.pt")
dist.destroy_process_group()
"""


def test_distributed_data_parallel_trains_as_one_process(tmp_path, run_python_in_parallel):
    """Two gloo processes with half the rows each take the steps of one process with all rows."""
    module = QRNN(3, 4, 2, window=2, bidirectional=True, dtype=torch.float64)
    data = {
        "weights": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "x": torch.randn(6, 4, 3, dtype=torch.float64),
        "lengths": torch.tensor([6, 2, 5, 1]),
    }
    torch.save(data, tmp_path / "data.pt")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        output, _ = module(data["x"], lengths=data["lengths"])
        optimizer.zero_grad()
        # The processes' gradients are averaged.
        (output.square().sum() / 2).backward()
        optimizer.step()

    run_python_in_parallel(TRAIN, [["0", str(tmp_path)], ["1", str(tmp_path)]])

    after = torch.load(tmp_path / "after.pt", weights_only=True)
    for name, tensor in module.state_dict().items():
        assert max_abs(after[name], tensor) <= GOLDEN_FLOAT64_MAX_ABS
        assert max_abs(tensor, data["weights"][name]) > 1e-6
