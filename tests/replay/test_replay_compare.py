"""What counts as a difference: bits, not values; and the rule of the visit log."""

from __future__ import annotations

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.replay.compare import tensor_difference
from cerebro_hydra.replay.record import TrialRecord


def test_equal_tensors_do_not_differ() -> None:
    tensor = torch.randn(3, 4)
    assert tensor_difference(tensor, tensor.clone()) is None


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


def test_zero_and_minus_zero_differ() -> None:
    assert tensor_difference(torch.tensor([0.0]), torch.tensor([-0.0])) is not None


def test_scalars_and_strided_tensors_can_be_compared() -> None:
    assert tensor_difference(torch.tensor(3), torch.tensor(3)) is None
    assert tensor_difference(torch.tensor(3), torch.tensor(4)) is not None
    tensor = torch.randn(4, 3)
    assert tensor_difference(tensor.t(), tensor.t().contiguous()) is None


def test_another_shape_or_type_is_named() -> None:
    difference = tensor_difference(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    assert difference is not None
    assert "torch.float32 (2,)" in difference


def test_a_rightful_visit_log_has_no_problem() -> None:
    record = TrialRecord(visits={1: (0, 1), 2: (0, 0), 3: (1, 0), 4: (1, 1)})
    assert record.problem(2) is None


def test_a_partition_visited_twice_is_a_problem() -> None:
    record = TrialRecord(visits={1: (0, 1), 2: (0, 1)})
    assert record.problem(2) == "partition 1 was visited twice in epoch 1"


def test_a_visit_in_the_wrong_epoch_is_a_problem() -> None:
    record = TrialRecord(visits={1: (0, 1), 2: (1, 0), 3: (0, 0), 4: (1, 1)})
    assert "visit 2 belongs to epoch 2" in str(record.problem(2))
