"""Two tensors are equal if their bits are, wherever they lie in memory."""

from __future__ import annotations

import pytest
import torch

from cerebro_hydra.shards.engine.differences import checksum, same_bits


@pytest.mark.parametrize("numbers", [0, 1, 2, 8])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_part_of_a_larger_tensor_equals_its_copy(numbers: int, at: int) -> None:
    part = torch.arange(16.0)[at : at + numbers]
    assert same_bits(part, part.clone()) and same_bits(part.clone(), part)
    assert checksum(part) == checksum(part.clone())
    if numbers:
        other = part.clone()
        other.view(torch.int32)[-1] ^= 1
        assert not same_bits(part, other) and not same_bits(other, part)
        assert checksum(part) != checksum(other)
