"""What counts as a difference: bits, not values; and the rule of the visit log."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.replay.compare import tensor_difference
from cerebro_hydra.replay.record import TrialRecord

TENSOR = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (TENSOR, TENSOR.clone(), None),
        (torch.tensor(3), torch.tensor(3), None),
        (TENSOR.t(), TENSOR.t().contiguous(), None),
        (torch.tensor(3), torch.tensor(4), "the run has"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "the run has"),
        (torch.zeros(2), torch.zeros(3, dtype=torch.int64), "torch.float32 (2,)"),
    ],
)
def test_tensors_differ_in_bits_shapes_and_types(
    one: torch.Tensor, other: torch.Tensor, said: str | None
) -> None:
    found = tensor_difference(one, other)
    assert found is None if said is None else said in str(found)


@given(st.integers(0, 11), st.integers(0, 31))
def test_any_flipped_bit_is_found_where_it_is(position: int, bit: int) -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    flipped = tensor.clone()
    flipped.view(torch.int32).view(-1)[position] ^= struct.unpack(
        "<i", struct.pack("<I", 1 << bit)
    )[0]
    difference = tensor_difference(flipped, tensor)
    assert difference is not None
    assert difference.startswith(f"[{position // 4}, {position % 4}]: the run has")


@pytest.mark.parametrize(
    ("visits", "problem"),
    [
        ([(0, 1), (0, 0), (1, 0), (1, 1)], None),
        ([(0, 1), (0, 1)], "partition 1 was visited twice in epoch 1"),
        ([(0, 1), (1, 0), (0, 0), (1, 1)], "visit 2 belongs to epoch 2"),
    ],
)
def test_a_visit_log_takes_each_partition_once_per_epoch(
    visits: list[tuple[int, int]], problem: str | None
) -> None:
    found = TrialRecord(visits=dict(enumerate(visits, start=1))).problem(2)
    assert found is None if problem is None else problem in str(found)
