"""Which plan is chosen from bytes and seconds, and what is said where none fits."""

from __future__ import annotations

import math
import tomllib
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qrnn_serve.core.config import from_mapping, to_mapping
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.model.checkpoint import save
from qrnn_serve.scorers import costs as layer_costs
from qrnn_serve.scorers.placement import Placement, read_placement
from qrnn_serve.scorers.planner import PlanRequest, make_plan
from qrnn_serve.scorers.planning import LayerCosts, Plan, Room, choose, rooms_of
from support.artefacts import random_model
from support.exported import MODELS, make_model


def costs(weights, seconds, batch=0, devices=("a", "b", "c", "d", "e", "f")):
    return LayerCosts(
        weight_bytes=weights,
        batch_bytes=lambda first, stop: batch,
        seconds=dict.fromkeys(devices, seconds),
        batch_timesteps=100,
        timed_timesteps=10,
    )


def rooms(*sizes, weights=1 << 40):
    return [
        Room(device=name, nbytes=size, weight_bytes=weights)
        for name, size in zip("abcdef", sizes, strict=False)
    ]


def edges(plan):
    """Per replica: devices and first layers."""
    return [
        [(p.stage.device, p.stage.first, p.stage.last) for p in stages] for stages in plan.replicas
    ]


def test_what_fits_is_replicated():
    """Every device has all of it."""
    plan = choose(costs([10, 10], [1, 1], batch=5), rooms(25, 30), "auto", can_cut=True)

    assert edges(plan) == [[("a", 0, 1)], [("b", 0, 1)]]
    assert "fits every device" in plan.why


def test_what_does_not_fit_is_cut_over_as_few_devices_as_hold_it():
    """Five devices of which two hold the model make two pipelines, one with the fifth device."""
    plan = choose(costs([10] * 6, [1.0] * 6), rooms(*[40] * 5), "auto", can_cut=True)

    assert edges(plan) == [
        [("a", 0, 1), ("b", 2, 3), ("c", 4, 5)],
        [("d", 0, 2), ("e", 3, 5)],
    ]
    assert "does not fit a, b, c, d, e" in plan.why


def test_layers_are_over_all_devices_even_where_they_fit_one():
    """As asked; the slowest stage is as fast as can be."""
    plan = choose(costs([10] * 4, [1, 1, 1, 3]), rooms(1000, 1000), "layers", can_cut=True)

    assert edges(plan) == [[("a", 0, 2), ("b", 3, 3)]]


def test_memory_stands_above_balance():
    """The balanced cut would not fit the first device."""
    plan = choose(costs([10] * 4, [1] * 4), rooms(10, 1000), "layers", can_cut=True)

    assert edges(plan) == [[("a", 0, 0), ("b", 1, 3)]]


def test_weights_have_a_limit_of_their_own():
    """The cap of the settings counts weights; the batch beside them is free memory's."""
    wide = [Room(device=d, nbytes=1000, weight_bytes=25) for d in "ab"]

    assert (
        len(choose(costs([10] * 4, [1] * 4, batch=500), wide, "auto", can_cut=True).replicas) == 1
    )


@given(
    layers=st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 10)), min_size=2, max_size=6),
    free=st.lists(st.integers(10, 120), min_size=2, max_size=4),
)
def test_layers_plan_is_the_best_of_all_cuts(layers, free):
    """Against every cut that fits; none is left out, and each layer is in one stage."""
    weights, seconds = zip(*layers, strict=True)
    places = rooms(*free)
    known = costs(weights, seconds)

    def slowest(inner):
        cut = list(pairwise([0, *inner, len(layers)]))
        fits = all(sum(weights[a:b]) <= r.nbytes for (a, b), r in zip(cut, places, strict=True))
        return max(sum(seconds[a:b]) for a, b in cut) if fits else math.inf

    cuts = combinations(range(1, len(layers)), len(places) - 1)
    best = min(map(slowest, cuts), default=math.inf)
    if math.isinf(best):
        with pytest.raises(ConfigError, match="placement"):
            choose(known, places, "layers", can_cut=True)
        return
    plan = choose(known, places, "layers", can_cut=True)

    [stages] = plan.replicas
    assert max(stage.seconds for stage in stages) == pytest.approx(best)
    numbers = [n for p in stages for n in range(p.stage.first, p.stage.last + 1)]
    assert numbers == list(range(len(layers)))


@pytest.mark.parametrize(
    ("known", "places", "mode", "can_cut", "message"),
    [
        (costs([10] * 4, [1] * 4, 5), rooms(15, 15), "auto", True,
         "40 bytes of weights and takes 5 for a batch of 100 timesteps; a may take 15, b may take "
         r"15; 30 bytes are missing on a device.*would fit 4 devices such as a"),
        (costs([10, 99], [1, 1], 5), rooms(50, 60), "auto", True,
         "Layer 1 alone misses 44 bytes on b"),
        (costs([40, 40], [1, 1]), rooms(50, 60), "auto", False,
         "30 bytes are missing on a device.*cannot be cut"),
        (costs([40, 40], [1, 1]), rooms(50, 90), "replicate", True,
         "30 bytes are missing on a device.*It fits b: name only devices that hold it"),
        (costs([1, 1], [1, 1]), rooms(9, 9, 9), "layers", True,
         "3 devices for a model of 2 layers.*name at most 2"),
        (costs([1, 1], [1, 1]), rooms(9, 9), "layers", False, "cannot be cut"),
    ],
)  # fmt: skip
def test_what_fits_nowhere_says_what_is_missing(known, places, mode, can_cut, message):
    """Bytes, on which device, and what would do."""
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        choose(known, places, mode, can_cut=can_cut)


def test_a_device_named_twice_is_shared():
    """Each stage on it may take half."""
    [a, b, c] = rooms_of(["x", "y", "x"], {"x": 1000, "y": 300}, None)

    assert (a.nbytes, b.nbytes, c.nbytes) == (450, 270, 450)
    assert [r.weight_bytes for r in rooms_of(["x", "y", "x"], {"x": 1000, "y": 300}, 100)] == [
        50,
        100,
        50,
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "causal.pt"
    save(random_model("causal"), path)
    return path


def request(path, **changes):
    settings = {"devices": ("cpu", "cpu"), "mode": "layers", "batch_timesteps": 64, "threads": 1}
    return PlanRequest(path=str(path), **settings | changes)


def test_plan_of_a_file_counts_its_weights_and_is_a_plan_file(checkpoint, tmp_path):
    """Bytes are those of the weights; what is printed is read back as the same placement."""
    plan = make_plan(request(checkpoint))

    [stages] = plan.replicas
    model = random_model("causal")
    assert sum(s.weight_bytes for s in stages) == sum(
        w.numel() * w.element_size() for w in model.state_dict().values()
    )
    assert all(s.seconds > 0 and s.batch_bytes > 0 for s in stages)
    (tmp_path / "plan.toml").write_text(plan.as_toml())
    assert read_placement(tmp_path / "plan.toml") == plan.placement
    assert from_mapping(Plan, to_mapping(plan)) == plan


def test_artefacts_are_planned_as_the_checkpoint(artefacts):
    """Their manifests say what they are; an ONNX graph is not cut."""
    sizes = {
        engine: sum(s.weight_bytes for s in make_plan(request(path)).replicas[0])
        for engine, path in artefacts["causal"].paths.items()
        if engine != "onnx"
    }

    assert len(set(sizes.values())) == 1
    with pytest.raises(ConfigError, match="an ONNX file, cannot be placed"):
        make_plan(request(artefacts["causal"].paths["onnx"]))


def test_independent_directions_are_replicated_only(tmp_path):
    """auto puts it on each device; layers says why it cannot."""
    save(make_model(MODELS["last of two directions"]), tmp_path / "model.pt")

    assert len(make_plan(request(tmp_path / "model.pt", mode="auto")).replicas) == 2
    with pytest.raises(ConfigError, match="meet only after its last layer"):
        make_plan(request(tmp_path / "model.pt"))


def test_layers_of_the_same_sizes_are_timed_once(monkeypatch):
    """A stack of 64 equal layers is three runs: the first, one between, the last."""
    timed = []
    monkeypatch.setattr(
        layer_costs, "_seconds", lambda model, *_: timed.append(model.config) or 1.0
    )
    alone = [layer_costs._alone(random_model("causal"), n) for n in (0, 1, 1, 1, 2)]

    assert layer_costs.layer_seconds(alone, "cpu", 64, 1) == [1.0] * 5
    assert len(timed) == 3


def test_another_process_gives_the_plan_or_the_error(checkpoint, monkeypatch):
    """As for GPUs: nothing of the measurement stays in the server."""
    from qrnn_serve.scorers import planner

    [stages] = planner._apart(request(checkpoint)).replicas
    assert [s.stage.device for s in stages] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="4 devices for a model of 3 layers"):
        planner._apart(request(checkpoint, devices=("cpu",) * 4))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="'cuda:0' is not there"):
            make_plan(request(checkpoint, devices=("cuda:0", "cuda:1")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing keys"),
        ("replicas = []", r"at least one table \[\[replicas\]\]"),
        ("[[replicas]]\nstages = []", r"replicas\[0\]: expected at least one stage"),
        ("[[replicas]]\nstages = [{device = 'cpu', first = 0}]", "missing keys"),
        ("[[replicas]]\nstages = [{device = 'cpu', first = 0, last = 1, x = 2}]", "unknown keys"),
        ("[[replicas]]\nstages = [{device = 'cpu', first = 0, last = '1'}]", "expected int"),
        ("[[replicas]]\nstages = [{device = 'cpu', first = 1, last = 1}]", "layers from 0 on"),
        ("[[replicas]\n", "not a TOML file"),
    ],
)
def test_wrong_plan_files(text, message, tmp_path):
    """Each names the place and what was expected."""
    path = tmp_path / "plan.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message) as caught:
        read_placement(path)
    assert str(path) in str(caught.value)


def test_a_plan_file_that_is_not_there(tmp_path):
    """The system's reason."""
    with pytest.raises(ConfigError, match="No such file"):
        read_placement(tmp_path / "none.toml")


def test_mixed_plans_are_read():
    """Two pipelines of two devices and one whole copy."""
    text = """
    [[replicas]]
    stages = [{device = "a", first = 0, last = 0}, {device = "b", first = 1, last = 1}]
    [[replicas]]
    stages = [{device = "c", first = 0, last = 1}]
    """
    placement = from_mapping(Placement, tomllib.loads(text))

    assert [replica.devices for replica in placement.replicas] == [("a", "b"), ("c",)]
