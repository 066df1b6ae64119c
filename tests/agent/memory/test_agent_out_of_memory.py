"""Errors that say that memory ran out are told from others, with the amount that was asked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cerebro_hydra.agent.memory.out_of_memory import REMEDY, memory_that_ran_out
from cerebro_hydra.shards.engine.microbatch import BatchTooLarge

HUGE = 1 << 50


def raised(action: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def wrapped() -> None:
    try:
        torch.empty(HUGE, dtype=torch.uint8)
    except RuntimeError as error:
        raise ValueError("the model is broken") from error


@pytest.mark.parametrize(
    ("action", "amount"),
    [
        (lambda: torch.empty(HUGE, dtype=torch.uint8), "1,048,576.00 GiB more"),
        (lambda: torch.empty(HUGE, dtype=torch.int16), "2,097,152.00 GiB more"),
        (lambda: np.empty(1 << 45, dtype=np.uint8), "32,768.00 GiB more"),
        (lambda: bytearray(HUGE), "what it asked for"),
        (wrapped, "1,048,576.00 GiB more"),
    ],
)
def test_real_errors_of_this_machine_are_recognised(
    action: Callable[[], object], amount: str
) -> None:
    assert memory_that_ran_out(raised(action)) == f"the machine has no room for {amount}; {REMEDY}"


def test_a_batch_that_is_larger_than_planned_is_told_by_its_shape() -> None:
    told = memory_that_ran_out(BatchTooLarge([torch.zeros(4, 90)], "takes 3 KiB", 2048))
    assert told is not None and "the machine" not in told
    assert told.startswith("a batch of shape [4, 90] takes 3 KiB, and with device_memory it may")


def test_errors_of_a_gpu_are_recognised_by_their_type() -> None:
    words = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 9.6 GiB"
    told = memory_that_ran_out(torch.OutOfMemoryError(words))
    assert told == f"the GPU has no room for 20.50 GiB more; {REMEDY}"
    error = torch.AcceleratorError("CUDA error: out of memory")
    error.error_code = 2
    assert memory_that_ran_out(error) == f"the GPU has no room for what it asked for; {REMEDY}"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("my dog is out of memory"),
        ValueError("DefaultCPUAllocator"),
        torch.AcceleratorError("x"),
    ],
)
def test_other_errors_are_not(error: Exception) -> None:
    assert memory_that_ran_out(error) is None
