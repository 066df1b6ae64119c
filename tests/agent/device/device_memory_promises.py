"""What every device's memory promises, whatever its hardware: a suite to inherit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.shards.engine.layout import Bytes, Segments

NAMES = ("frozen", "trainable", "gradients")


def shard(mark: int, nbytes: int = 4096) -> dict[str, Bytes]:
    return {name: np.full(nbytes + k, mark + k, np.uint8) for k, name in enumerate(NAMES)}


def content(slots: Segments) -> dict[str, bytes]:
    return {name: bytes(slot.cpu().numpy()) for name, slot in slots.items()}


def of(slabs: dict[str, Bytes]) -> dict[str, bytes]:
    return {name: bytes(slab) for name, slab in slabs.items()}


class DeviceMemoryPromises:
    """Needs a fixture `memory`, which poisons."""

    def test_a_shard_comes_and_goes_as_it_is(self, memory: DeviceMemory) -> None:
        slabs = shard(10)
        slots = memory.promote(slabs, 0)
        assert content(slots) == of(slabs)
        for slot in slots.values():
            assert (slot.dtype, slot.dim()) == (torch.uint8, 1)
            slot.add_(1)
        memory.finish()
        back = {"trainable": np.zeros(4097, np.uint8)}
        memory.demote(slots, back)
        memory.give_up(slots)
        assert of(back) == {"trainable": bytes([12]) * 4097}

    @pytest.mark.parametrize("nbytes", [0, 1, 513])
    def test_gradients_begin_with_zeros_where_there_are_none(
        self, memory: DeviceMemory, nbytes: int
    ) -> None:
        memory.give_up(memory.promote(shard(1, 513), 0))  # what is lent next is not zeroed
        slabs = {name: slab for name, slab in shard(3).items() if name != "gradients"}
        slots = memory.promote(slabs, nbytes)
        zeros = {"gradients": bytes(nbytes)} if nbytes else {}
        assert content(slots) == of(slabs) | zeros
        slots = memory.promote(shard(3), 7)
        assert content(slots) == of(shard(3)), "it had gradients"

    def test_a_slot_that_was_given_up_shows_it(self, memory: DeviceMemory) -> None:
        slots = memory.promote({"frozen": np.zeros(4096, np.uint8)}, 0)
        memory.give_up(slots)
        assert slots["frozen"].view(torch.float32).isnan().all()

    def test_slots_of_one_size_are_used_again(self, memory: DeviceMemory) -> None:
        places: set[int] = set()
        for mark in range(5):
            slots = memory.promote(shard(mark), 0)
            places |= {slot.data_ptr() for slot in slots.values()}
            memory.give_up(slots)
            del slots
        assert len(places) <= len(NAMES)

    def test_its_peak_is_of_what_was_there_at_once(self, memory: DeviceMemory) -> None:
        first = memory.promote(shard(1), 0)
        second = memory.promote(shard(2), 0)
        memory.give_up(first)
        memory.give_up(memory.promote(shard(3), 0))
        memory.give_up(second)
        assert memory.peak == 2 * sum(slab.nbytes for slab in shard(0).values())

    def test_shards_move_from_two_threads_at_once(self, memory: DeviceMemory) -> None:
        def round_trip(mark: int) -> bool:
            back = shard(0)
            for _ in range(20):
                slots = memory.promote(shard(mark), 0)
                memory.demote(slots, back)
                memory.give_up(slots)
            return of(back) == of(shard(mark))

        with ThreadPoolExecutor(3) as threads:
            assert all(threads.map(round_trip, (1, 50, 100)))

    def test_memory_that_is_not_there_costs_none(self, memory: DeviceMemory) -> None:
        with pytest.raises((MemoryError, RuntimeError)):
            memory.promote({"frozen": np.zeros(64, np.uint8)}, 1 << 50)
        memory.runtime.release()
        slots = memory.promote(shard(5), 0)
        assert content(slots) == of(shard(5))
