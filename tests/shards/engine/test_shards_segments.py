"""Segments are valid safetensors, equal where their content is equal, and bound without copies."""

from __future__ import annotations

import gc
import json
import math
from collections import Counter

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.engine.differences import checksum, same_bits
from cerebro_hydra.shards.engine.layout import (
    in_place,
    initial_segments,
    on_host,
    read_tensors,
)
from cerebro_hydra.shards.engine.microbatch import memory_reads_seen
from cerebro_hydra.shards.engine.state import ShardState, decode, encode
from cerebro_hydra.storage.digest import digest
from tests.shards import plain, zoo
from tests.shards.executors.executor_case import Proof, assert_equal_to_plain
from tests.shards.hopping import start
from tests.shards.trials import (
    first_layer_frozen,
    mlp_recipe,
    resnet_recipe,
    two_sub_epochs,
)


def test_a_segment_is_a_safetensors_file():
    one = Proof(resnet_recipe(3), [zoo.singly(zoo.images(6, 4))], "export")
    trial = one.trial
    trial.train(one.sub_epochs[0])
    found = {}
    for content, _ in trial.shards:
        for segment in content.values():
            loaded = safetensors.torch.load(segment)
            assert loaded.keys() >= read_tensors(np.frombuffer(segment, np.uint8)).keys()
            found |= {n: plain.bits(t) for n, t in loaded.items() if not n.startswith("pad:")}
    marks = found.pop("exists")
    assert set(marks[2]) == {1}
    assert found == {n: plain.bits(t) for n, t in one.reference.tensors().items()}


def test_every_tensor_is_aligned_and_every_gap_has_a_name():
    trial = start(mlp_recipe()(), two_sub_epochs()[0])
    for shard in trial.layout.shards:
        for segment in (shard.frozen, shard.trainable):
            assert all(entry.offset % 256 == 0 for entry in segment.entries)
            assert segment.allocate().ctypes.data % 256 == 0
            assert segment.nbytes % 256 == 0
            assert safetensors.torch.load(segment.allocate().tobytes()) is not None


def test_frozen_layers_of_different_trials_have_one_digest():
    def segments(lr):
        make = mlp_recipe(lambda m: torch.optim.AdamW(m.parameters(), lr=lr),
                          model=first_layer_frozen)  # fmt: skip
        trial = start(make(), two_sub_epochs()[0])
        trial.train(two_sub_epochs()[0])
        return trial.shards

    a, b = segments(0.1), segments(0.01)
    assert digest(a[0][0]["frozen"]) == digest(b[0][0]["frozen"])
    assert digest(a[1][0]["trainable"]) != digest(b[1][0]["trainable"])


def test_a_digest_sees_every_byte_of_any_kind_of_buffer():
    data = np.arange(1000, dtype=np.uint8)
    same = {digest(b) for b in (data, data.tobytes(), memoryview(data))}
    same.add(tensor_digest(torch.from_numpy(data)))
    (name,) = same
    assert len(name) == 32
    data[-1] ^= 1
    assert digest(data) != name


def test_parameters_are_bound_in_place_and_momentum_does_not_exist_before_its_first_step():
    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    trial = start(mlp_recipe(sgd)(), two_sub_epochs()[0])
    layout = trial.layout.shards[0]
    segments = next(initial_segments(trial.recipe, trial.layout))
    state = ShardState(layout, on_host(segments))
    assert state.existing_optimizer_state() == {}
    with torch.no_grad():
        state.params["0.weight"].fill_(7.0)
    assert read_tensors(segments["trainable"])["param:0.weight"].eq(7.0).all()


def test_memory_that_is_not_aligned_is_not_trained_in():
    trial = start(mlp_recipe()(), two_sub_epochs()[0])
    segments = next(initial_segments(trial.recipe, trial.layout))
    raw = np.empty(segments["trainable"].nbytes + 128, np.uint8)
    start_at = -raw.ctypes.data % 64 + 8
    raw[start_at : start_at + segments["trainable"].nbytes] = segments["trainable"]
    skewed = raw[start_at : start_at + segments["trainable"].nbytes]
    trained = in_place({**segments, "trainable": skewed})
    assert trained["frozen"] is segments["frozen"]
    assert trained["trainable"].ctypes.data % 256 == 0
    assert trained["trainable"] is not skewed
    assert np.array_equal(trained["trainable"], skewed)


def test_a_segment_of_another_layout_is_refused():
    trial = start(mlp_recipe()(), two_sub_epochs()[0])
    a, b, *_ = initial_segments(trial.recipe, trial.layout)
    with pytest.raises(ValueError, match="belongs to another trial or cut"):
        ShardState(trial.layout.shards[0], on_host({**a, "trainable": b["trainable"]}))


def test_parameters_keep_the_order_in_which_they_lie_in_memory():
    def make() -> Recipe:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(),
                              nn.Linear(48, 3)).to(memory_format=torch.channels_last)  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=2)

    trial = assert_equal_to_plain(make, [zoo.singly(zoo.images(6, 4))] * 2)
    weight = make().model[2].weight
    assert not weight.is_contiguous()
    entry = next(
        e for s in trial.layout.shards for e in s.trainable.entries if e.name == "param:2.weight"
    )
    assert entry.strides == weight.stride()


@pytest.mark.parametrize(
    "value",
    [
        (0.9, 0.999), {"a": [1, 2.5, None, True]}, Counter({3: 2, 10: 1}), {1: "x", 2: ("y",)},
        math.inf, -math.inf, {"!": 1}, 0.1 + 0.2,
    ],
)  # fmt: skip
def test_cursor_values_come_back_equal_through_json(value):
    back = decode(json.loads(json.dumps(encode(value, "it"), allow_nan=False)))
    assert back == value
    assert type(back) is type(value)


def test_a_cursor_value_that_json_lacks_is_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"group\['lr'\] is a Tensor"):
        encode({"lr": torch.tensor(0.1)}, "group")


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


@pytest.mark.parametrize("takes_it_back", [False, True])
def test_methods_that_a_library_gives_to_tensors_while_they_are_watched_stay(
    takes_it_back: bool,
) -> None:
    gc.collect()  # a visit that failed in another test may watch on in a reference cycle
    try:
        with memory_reads_seen():
            Tensor.numpy = lambda tensor: "theirs"
            if takes_it_back:
                del Tensor.numpy
        assert Tensor.tolist is torch._C.TensorBase.tolist
        if takes_it_back:
            assert Tensor.numpy is torch._C.TensorBase.numpy
        else:
            assert torch.ones(1).numpy() == "theirs"
        with memory_reads_seen():
            assert torch.ones(1).tolist() == [1.0]
    finally:
        if "numpy" in vars(Tensor):
            del Tensor.numpy
    assert torch.ones(1).tolist() == torch.ones(1).numpy() == [1.0]
