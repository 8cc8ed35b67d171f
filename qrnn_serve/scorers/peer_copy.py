"""Whether copies between GPUs deliver what was sent.

On some hosts (an IOMMU that remaps, certain PCIe layouts) a direct copy reports success and
delivers zeros or old data: pytorch/pytorch#84803. So each pair that is used is tried with a pattern
before anything is scored, small and large, more than once: the first copy between two devices takes
another way than later ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

DevicePair = tuple[torch.device, torch.device]
Copy = Callable[[Tensor, torch.device], Tensor]

_SIZES = (1 << 10, 64 << 20)
_TRIES = 2
_PRIME = 2_147_483_629


def broken_pairs(pairs: Iterable[DevicePair], copy: Copy = Tensor.to) -> set[DevicePair]:
    """The ordered pairs of devices between which a copy delivers other bytes; each is logged.

    Args:
        pairs: Source and target.
        copy: Copies a tensor to a device.
    """
    broken = {pair for pair in set(pairs) if pair[0] != pair[1] and not _is_true(*pair, copy)}
    for source, target in sorted(broken, key=str):
        logger.warning(
            "direct copies from %s to %s deliver other data than was sent; they go through the "
            "host's memory, which is slower. The IOMMU's settings are a known cause",
            source,
            target,
        )
    return broken


def _is_true(source: torch.device, target: torch.device, copy: Copy) -> bool:
    for seed in range(_TRIES):
        for nbytes in _SIZES:
            numbers = torch.arange(nbytes // 8, dtype=torch.int64)
            # Another pattern each time, so that what an earlier copy left is no success.
            pattern = (numbers + 1) * (_PRIME + 2 * seed) ^ seed
            arrived = copy(pattern.to(source), target).cpu()
            if not torch.equal(arrived, pattern):
                return False
    return True
