"""Takes the names that wrappers leave in a state dict (DataParallel, torch.compile) off again."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

_WRAPPERS = {"module": "DataParallel", "_orig_mod": "torch.compile"}


def without_wrappers(tensors: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """The state dict as it was before parts of the model, or all of it, were wrapped.

    `module.` counts as a wrapper, at any depth, only if every name below the same parent has it.
    Weight drop's `linear.module.` is none: beside it the layouts look for the true weight.

    Args:
        tensors: A state dict.
        notes: What was taken off is added here.
    """
    below = Counter(tuple(parts[:n]) for parts in _split(tensors) for n in range(len(parts)))
    wrappers = {
        path
        for path, count in below.items()
        if path
        and path[-1] in _WRAPPERS
        and path[-2:-1] != ("linear",)
        and count == below[path[:-1]]
    }
    for path in sorted(wrappers):
        where = ".".join(path[:-1])
        every = f"every name below {where!r} starts" if where else "every name starts"
        notes.append(f"{every} with '{path[-1]}.' ({_WRAPPERS[path[-1]]}), which is taken off")
    return {
        ".".join(p for n, p in enumerate(parts) if tuple(parts[: n + 1]) not in wrappers): tensor
        for parts, tensor in zip(_split(tensors), tensors.values(), strict=True)
    }


def _split(tensors: dict[str, Tensor]) -> list[list[str]]:
    return [name.split(".") for name in tensors]
