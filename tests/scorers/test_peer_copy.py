"""Copies between devices that lie are found. The devices are made up: no GPU is needed."""

from __future__ import annotations

import logging

import pytest
import torch

from qrnn_serve.scorers.peer_copy import broken_pairs


class Host:
    """Copies from the one to the other "device" go wrong in one way."""

    def __init__(self, fault):
        self.fault, self.last = fault, {}

    def copy(self, tensor, target):
        """A copy as `Tensor.to` makes it, but for the fault."""
        earlier = self.last.get(tensor.numel())
        self.last[tensor.numel()] = tensor.clone()
        if self.fault == "zeros":
            return torch.zeros_like(tensor)
        if self.fault == "the copy before" and earlier is not None:
            return earlier
        if self.fault == "large ones end early" and tensor.numel() > 1000:
            return torch.cat([tensor[:-1], torch.zeros_like(tensor[:1])])
        return tensor.clone()


def pair():
    return torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("fault", ["zeros", "the copy before", "large ones end early"])
def test_broken_copies_are_found_and_said_once(fault, caplog):
    """The pair, and what is done about it."""
    with caplog.at_level(logging.WARNING):
        found = broken_pairs([pair(), pair()], Host(fault).copy)

    assert found == {pair()}
    [record] = caplog.records
    assert "from cpu to meta deliver other data" in record.message
    assert "through the host's memory" in record.message


def test_true_copies_are_not_broken():
    """Nothing is said of them, and a device is not tried with itself."""
    assert broken_pairs([pair()], Host(None).copy) == set()
    assert broken_pairs([(torch.device("meta"), torch.device("meta"))], Host("zeros").copy) == set()
