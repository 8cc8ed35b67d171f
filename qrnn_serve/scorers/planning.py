"""Chooses where the layers of a model go: measured seconds, counted bytes, and what is free.

What fits a device is replicated on each. What does not is cut into stages over as few devices as
hold it, and as many such groups are made as there are devices for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, get_args

from qrnn_serve.core.errors import ConfigError
from qrnn_serve.model.parts import lightest_cut
from qrnn_serve.scorers.placement import PlacedReplica, Placement, Stage

Mode = Literal["auto", "replicate", "layers"]
MODES: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}

_USABLE_SHARE = 0.9
"""Of free memory; kernels and allocators take some beside what is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A stage and what is expected of it.

    Attributes:
        stage: It.
        weight_bytes: Size of its weights.
        batch_bytes: Memory that a batch of `Plan.batch_timesteps` takes beside them.
        room_bytes: Memory that it may take.
        seconds: Of a batch of `Plan.timed_timesteps`.
    """

    stage: Stage
    weight_bytes: int
    batch_bytes: int
    room_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement and its reasons.

    Attributes:
        replicas: Each with its stages in order.
        why: Why it is this one.
        batch_timesteps: Of the batches that memory was counted for.
        timed_timesteps: Of the batches that were timed.
    """

    replicas: tuple[tuple[PlannedStage, ...], ...]
    why: str
    batch_timesteps: int
    timed_timesteps: int

    @property
    def placement(self) -> Placement:
        """What is where, alone."""
        return Placement(
            replicas=tuple(
                PlacedReplica(stages=tuple(planned.stage for planned in stages))
                for stages in self.replicas
            )
        )

    def as_toml(self) -> str:
        """A plan file, with what is expected and why as comments."""
        lines = [
            f"# {self.why}",
            f"# Seconds are those of a batch of {self.timed_timesteps} timesteps, memory is that "
            f"of one of {self.batch_timesteps}.",
        ]
        for stages in self.replicas:
            seconds = [planned.seconds for planned in stages]
            lines += ["", "[[replicas]]"]
            if len(stages) > 1:
                lines.append(
                    f"# {sum(seconds):.3g} s one stage after the other, "
                    f"{max(seconds):.3g} s a batch when they overlap"
                )
            lines.append("stages = [")
            for planned in stages:
                stage = planned.stage
                lines.append(
                    f'  {{ device = "{stage.device}", first = {stage.first}, last = {stage.last} }}'
                    f",  # {planned.seconds:.3g} s; {planned.weight_bytes:,} bytes of weights and "
                    f"{planned.batch_bytes:,} of a batch, {planned.room_bytes:,} may be taken"
                )
            lines.append("]")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a stage may take of a device.

    Attributes:
        device: It.
        nbytes: Memory in all.
        weight_bytes: Memory of weights.
    """

    device: str
    nbytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What the layers of a model cost.

    Attributes:
        weight_bytes: Of each layer, the embedding and head with the first and last.
        batch_bytes: What a batch takes beside the weights on the device of layers first to
            stop - 1, given (first, stop).
        seconds: Of each layer, by device.
        batch_timesteps: Of that batch.
        timed_timesteps: Of the batch that was timed.
    """

    weight_bytes: Sequence[int]
    batch_bytes: Callable[[int, int], int]
    seconds: Mapping[str, Sequence[float]]
    batch_timesteps: int
    timed_timesteps: int

    @property
    def layers(self) -> int:
        """Their number."""
        return len(self.weight_bytes)

    def missing_bytes(self, first: int, stop: int, room: Room) -> int:
        """What layers first to stop - 1 with a batch need beyond a room; 0 where they fit."""
        weights = sum(self.weight_bytes[first:stop])
        whole = weights + self.batch_bytes(first, stop)
        return max(whole - room.nbytes, weights - room.weight_bytes, 0)


def rooms_of(devices: Sequence[str], free: Mapping[str, int], cap: int | None) -> list[Room]:
    """What a stage on each of the devices may take.

    Args:
        devices: One that is named twice is shared.
        free: Bytes that each has left.
        cap: Most bytes that weights may take on one device; None for no cap.
    """
    copies = Counter(devices)
    return [
        Room(
            device=device,
            nbytes=int(free[device] * _USABLE_SHARE) // copies[device],
            weight_bytes=(free[device] if cap is None else cap) // copies[device],
        )
        for device in devices
    ]


def choose(costs: LayerCosts, rooms: Sequence[Room], mode: Mode, *, can_cut: bool) -> Plan:
    """Choose a plan.

    Args:
        costs: Of the model.
        rooms: On the devices, in the order in which stages follow one another.
        mode: "replicate" puts the model on each, "layers" one over all, "auto" decides.
        can_cut: Whether its layers can be on different devices.

    Raises:
        ConfigError: It does not fit, or there are more devices than layers.
    """
    if mode == "layers" and len(rooms) > costs.layers:
        raise ConfigError(
            f"placement layers: {len(rooms)} devices for a model of {costs.layers} layers; each "
            f"stage needs a layer, name at most {costs.layers} devices"
        )
    fewest = len(rooms) if mode == "layers" else 1
    most = {"replicate": 1, "auto": min(len(rooms), costs.layers), "layers": len(rooms)}[mode]
    for size in range(fewest, (most if can_cut else 1) + 1):
        groups = [rooms[a:b] for a, b in _groups(len(rooms), size, costs.layers)]
        cuts = [_cut(costs, group) for group in groups]
        if all(cuts):
            why = f"{mode}: {_why(costs, rooms, size, mode)}"
            return _planned(costs, [(c, g) for c, g in zip(cuts, groups, strict=True) if c], why)
    raise _no_room(costs, rooms, can_cut=can_cut)


def _why(costs: LayerCosts, rooms: Sequence[Room], size: int, mode: Mode) -> str:
    if mode == "layers":
        return f"one copy of the model, its layers over {size} devices, as was asked"
    if size == 1:
        return "the model fits every device, so each has all of it"
    small = [room.device for room in rooms if costs.missing_bytes(0, costs.layers, room)]
    return (
        f"the model does not fit {', '.join(dict.fromkeys(small))}, so its layers are cut over "
        f"{size} devices"
    )


def _groups(devices: int, size: int, layers: int) -> list[tuple[int, int]]:
    """Devices first to stop - 1 of each group: as many groups as can be, devices shared evenly."""
    count = devices // size
    sizes = [min(devices // count + (n < devices % count), layers) for n in range(count)]
    return list(pairwise(accumulate(sizes, initial=0)))


def _cut(costs: LayerCosts, rooms: Sequence[Room]) -> list[int] | None:
    """The edges of the stages whose slowest is fastest; None where no cut fits the memory."""

    def weigh(first: int, stop: int, number: int) -> float:
        if costs.missing_bytes(first, stop, rooms[number]):
            return math.inf
        return sum(costs.seconds[rooms[number].device][first:stop])

    if len(rooms) > costs.layers:
        return None
    edges = lightest_cut(weigh, costs.layers, len(rooms))
    heaviest = max(weigh(a, b, number) for number, (a, b) in enumerate(pairwise(edges)))
    return None if math.isinf(heaviest) else edges


def _planned(costs: LayerCosts, cuts: Sequence[tuple[list[int], Sequence[Room]]], why: str) -> Plan:
    """The plan with these edges of stages and their devices, one pair a replica."""
    replicas = [
        tuple(
            PlannedStage(
                stage=Stage(device=room.device, first=first, last=stop - 1),
                weight_bytes=sum(costs.weight_bytes[first:stop]),
                batch_bytes=costs.batch_bytes(first, stop),
                room_bytes=room.nbytes,
                seconds=sum(costs.seconds[room.device][first:stop]),
            )
            for (first, stop), room in zip(pairwise(edges), rooms, strict=True)
        )
        for edges, rooms in cuts
    ]
    return Plan(
        replicas=tuple(replicas),
        why=why,
        batch_timesteps=costs.batch_timesteps,
        timed_timesteps=costs.timed_timesteps,
    )


def _no_room(costs: LayerCosts, rooms: Sequence[Room], *, can_cut: bool) -> ConfigError:
    """What is missing, and what would do."""
    whole = sum(costs.weight_bytes), costs.batch_bytes(0, costs.layers)
    largest = max(rooms, key=lambda room: (room.weight_bytes, room.nbytes))
    missing = max(costs.missing_bytes(0, costs.layers, room) for room in rooms)
    has = ", ".join(
        f"{room.device} may take {min(room.nbytes, room.weight_bytes):,}" for room in rooms
    )
    message = (
        f"placement: the model has {whole[0]:,} bytes of weights and takes {whole[1]:,} for a "
        f"batch of {costs.batch_timesteps} timesteps; {has}; {missing:,} bytes are missing on a "
        "device"
    )
    if not can_cut:
        return ConfigError(
            f"{message}. The two directions of this model meet only after its last layer, so it "
            "cannot be cut"
        )
    for layer in range(costs.layers):
        if alone := costs.missing_bytes(layer, layer + 1, largest):
            return ConfigError(
                f"{message}. Layer {layer} alone misses {alone:,} bytes on {largest.device}: a "
                "smaller --max-batch-timesteps or another precision (qrnn-export --dtype) takes "
                "less"
            )
    enough = next(
        count for count in range(1, costs.layers + 1) if _cut(costs, [largest] * count) is not None
    )
    if enough == 1:
        return ConfigError(f"{message}. It fits {largest.device}: name only devices that hold it")
    return ConfigError(
        f"{message}. With --placement layers it would fit {enough} devices such as "
        f"{largest.device}, if none is shared"
    )
