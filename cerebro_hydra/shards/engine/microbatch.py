"""A microbatch is one batch on its way through the shards of a trial.

It is made of the windows that a reader gives. What its operations hold and read can be watched.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._pytree import tree_leaves

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.plan.human_units import bytes_text
from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.recipe import RandomKey, Recipe, Window
from cerebro_hydra.recipe.plain_trainer import not_finite
from cerebro_hydra.shards.cut.model import CutModel
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.shards.cut.torch_cond import Watch, plain_branches
from cerebro_hydra.shards.cut.values import ParameterValues
from cerebro_hydra.shards.engine.differences import tensor_used_elsewhere
from cerebro_hydra.shards.places import Places
from cerebro_hydra.threads import SetForAll

Reach = Callable[[Literal["F", "B"], int], object]
"""Is called before F or B of a shard begins, and may block until it may."""

Then = Callable[[Action], Action]
"""Is told of a task that was done, and returns the one after it, once that can be done."""


Scale = Callable[[Tensor], Tensor]
"""Returns from what backward begins: a loss as it is weighted in its window, perhaps scaled."""


@dataclass
class Microbatch:
    """Carries one batch, and its loss when it is known.

    In the last step of a sub-epoch, bytes are compared that no version tells of.
    """

    recipe: Recipe
    features: Sequence[Tensor]
    targets: Sequence[Tensor]
    weight: float | None  # of its loss in a window of several microbatches, else None
    key: RandomKey
    loss: float = float("nan")
    in_last_step: bool = False
    looks: bool = False
    """Whether it is looked at what its operations use of shards that are elsewhere."""
    idle: Places | None = None
    """Where the model has what its graph has elsewhere, if it is cut as a graph."""

    @classmethod
    def collated(
        cls, recipe: Recipe, example: Example, key: RandomKey, weight: float | None
    ) -> Microbatch:
        """Return a batch before shard 0, as `collate` leaves it."""
        features, targets = recipe.collated(*example, key)
        return cls(recipe, features, targets, weight, key)

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Return what the model takes."""
        return self.recipe.inputs(self.features, self.targets)

    def loss_of(self, outputs: Any) -> Tensor:
        """Return the mean loss of the model's outputs."""
        if self.idle is None:
            return self.recipe.compute_loss(outputs, self.targets)
        with UsesElsewhere(self.idle, self.looks) as uses:
            loss = self.recipe.compute_loss(outputs, self.targets)
        if uses.found is not None and self.idle.used is None:
            self.idle.used = tensor_used_elsewhere(self.key.step, uses.found)
        return loss

    def finish_forward(self, loss: Tensor, outputs: Any) -> None:
        """Note the loss of the model's outputs.

        Raises:
            NonFiniteLoss: it is NaN or infinite.
            StepDiffers: it is because it uses what its model has elsewhere.
        """
        self.loss = loss.item()
        if not math.isfinite(self.loss):
            if self.idle is not None and self.idle.used is not None:
                raise StepDiffers(self.idle.used)
            raise not_finite(self.loss, self.key.step, self.key.microbatch, outputs)


@dataclass(frozen=True)
class SubEpochInput:
    """Holds what a trial trains on in a sub-epoch, from which step on.

    Args:
        start_step: the number of optimizer steps that the trial has done before the sub-epoch.
        windows: the batches of each optimizer step of the sub-epoch.
        epoch_metrics: see `Engine.train`.
        steps: the number of optimizer steps of the sub-epoch, for trials that read older weights.
    """

    start_step: int = 0
    windows: Iterable[Window] = ()
    epoch_metrics: Mapping[str, float] | None = None
    steps: int = 0


@dataclass(frozen=True)
class OtherBatch:
    """Stands for a batch that another replica trains on, of which only the rows are known here."""

    rows: int

    @property
    def features(self) -> tuple[Tensor, ...]:
        """Return nothing."""
        return ()

    @property
    def labels(self) -> tuple[Tensor, ...]:
        """Return nothing."""
        return ()


class UnfitShape(ConfigurationError):
    """A batch has a shape that the cut model can't take, though the uncut model may."""


class MicrobatchMaker:
    """Collates the batches of one trial and checks their shapes."""

    def __init__(self, cut_model: CutModel, recipe: Recipe, trial_seed: int) -> None:
        self._cut_model = cut_model
        self._recipe = recipe
        self._trial_seed = trial_seed
        self._shapes_seen: set[tuple[torch.Size, ...]] = set()

    def make(self, window: Window, number: int, step: int) -> Microbatch:
        """Return a batch of a window, whose loss counts by its rows.

        Raises:
            UnfitShape: it has a shape that the cut model can't take.
        """
        batch = window[number]
        weight = batch.rows / sum(each.rows for each in window) if len(window) > 1 else None
        key = RandomKey(self._trial_seed, step, number, self._recipe.device)
        made = Microbatch.collated(self._recipe, (batch.features, batch.labels), key, weight)
        self.check_shapes(made.inputs)
        return made

    def check_shapes(self, inputs: Sequence[Tensor]) -> None:
        """Refuse shapes that break an assumption of an exported graph; each is checked once."""
        if self._recipe.collate is None:
            return  # prepared columns have one shape
        shapes = tuple(x.shape for x in inputs)
        if shapes in self._shapes_seen:
            return
        graphs = self._cut_model.graphs
        for guards in graphs.of(inputs).guards if graphs else ():
            if (condition := guards.violated(inputs)) is not None:
                raise UnfitShape(
                    f"collate gave a batch of shapes {[tuple(s) for s in shapes]}, which the cut "
                    f"model can't take: {condition}; give such batches another shape, or shards=1"
                )
        self._shapes_seen.add(shapes)


class BatchTooLarge(MemoryError):
    """A batch holds more of a device than was planned; says its shape, and what to do."""

    def __init__(self, inputs: Sequence[Tensor], holds: str, may: int) -> None:
        shapes = ", ".join(str(list(each.shape)) for each in inputs)
        super().__init__(
            f"a batch of shape {shapes} {holds}, and with device_memory it may have "
            f"{bytes_text(may)}, by the largest batch of the first rows; let collate limit the "
            f"size of a batch, or use {SMALLER_BATCHES}"
        )


SMALLER_BATCHES = "a smaller batch_size, with accumulate for steps of as many rows"


class LiveBytes(Watch):
    """Counts, while it is entered, the bytes of results that somebody refers to.

    What an operation takes and gives back inside of itself is not seen.

    Attributes:
        now: the bytes at present.
        peak: the most bytes since it was set.
        most: the bytes that there may be; an operation that passes them raises an error.
        inputs: those of the batch whose bytes are counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.most: float = math.inf
        self.inputs: Sequence[Tensor] = ()
        self._seen: dict[int, int] = {}  # the bytes that count of each storage

    def counts(self, tensor: Tensor) -> bool:
        """Return whether a tensor's bytes are among those at present."""
        return self._seen.get(tensor.untyped_storage()._cdata, 0) > 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for storage in storages_of((*args, *kwargs.values())):
            self._count(storage, 0)  # it was there before
        result = func(*args, **kwargs)
        for storage in storages_of(result if isinstance(result, list | tuple) else (result,)):
            self._count(storage, storage.nbytes())
        if self.now > self.most:
            holds = f"takes {bytes_text(self.now)} of a device beside its shard"
            raise BatchTooLarge(self.inputs, holds, int(self.most))
        return result

    def _count(self, storage: UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen[key] = nbytes
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._seen.pop(key, None)
        self.now -= nbytes


@dataclass(frozen=True)
class MemoryLimit:
    """Bounds what tasks hold of a device, by what the tasks of one batch were measured to hold.

    Args:
        batch: the bytes of that batch; one that has no more needs no more, and is not watched.
        most: the bytes that tasks of each shard may hold.
    """

    batch: int
    most: Sequence[int]

    @contextmanager
    def kept(
        self,
        inputs: Sequence[Tensor],
        held: Iterable[Tensor],
        reach: Reach,
        live: LiveBytes | None = None,
    ) -> Iterator[Reach]:
        """Raise an error where a batch passes the limit; its `reach` is the one to call.

        Args:
            held: what is on the device for the batch by now.
            live: counts what earlier tasks of the batch have left, too, and goes on with this one.

        Raises:
            BatchTooLarge: it does.
        """
        nbytes = sum(each.nbytes for each in inputs)
        if nbytes <= self.batch:
            yield reach
            return
        live = LiveBytes() if live is None else live
        beside = nbytes + sum(each.nbytes for each in held if not live.counts(each))
        live.now, live.inputs = live.now + beside, inputs

        def watched(kind: Literal["F", "B"], k: int) -> None:
            reach(kind, k)
            live.most = self.most[k]

        try:
            with live:
                yield watched
        finally:
            live.now -= beside


@dataclass(frozen=True)
class Execution:
    """Says how a device does the tasks of a visit, which changes no bit of the result.

    Args:
        recompute: whether B computes the shard's activations again, so that the shard may be
            unloaded between its F and its B. Otherwise all shards stay until no microbatch is
            under way, and so do autograd's graphs.
        resident: whether shards stay once they are there, until the visit is closed.
        moves: whether microbatches go on on other devices.
        crossings: the shards to which microbatches come from other devices; None if any may.
        shared: parameters that are read while another shard than theirs runs, if the cut model does
            not know of it.
        limit: bounds what tasks hold of the device beside their shards; None does not.
        watched: a window after whose updates others look at shards, or at those of the first one.
    """

    recompute: bool = False
    resident: bool = False
    moves: bool = False
    crossings: Collection[int] | None = None
    shared: Collection[str] = ()
    limit: MemoryLimit | None = None
    watched: int | None = None


class UsesElsewhere(Watch):
    """Notes the first operation that reads or writes what lies at one of these places.

    Such a read may have no effect that is seen: a comparison swallows NaN. What reads memory by no
    operation of torch, as NumPy does, is noted within `memory_reads_seen`.

    Attributes:
        found: what lies there, or None.
        resting: whether operations are let pass at present.

    Args:
        looks: whether operations of torch are looked at, too, which takes some time for each.
    """

    def __init__(self, places: Places, looks: bool = True) -> None:
        super().__init__()
        self.found: str | None = None
        self.resting = False
        self._places = places
        self._looks = looks
        self._thread = 0

    def __enter__(self) -> UsesElsewhere:
        self._thread = threading.get_ident()
        _looking.append(self)
        if self._looks:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _looking.remove(self)
        if self._looks:
            super().__exit__(*error)

    def look(self, values: Iterable[Any]) -> None:
        """Note that values are read, if that is the first use of one of the places."""
        if self.found is None and not self.resting and self._thread == threading.get_ident():
            found = (self._places.at(address) for address in _addresses(values))
            self.found = next((told for told in found if told is not None), None)

    def at_rest(self, reach: Reach) -> Reach:
        """Return a `reach` whose operations pass, since they are none of the trial's code."""

        def resting(kind: Literal["F", "B"], shard: int) -> None:
            self.resting = True
            reach(kind, shard)
            self.resting = False

        return resting

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.found is None and reads_values(func):
            self.look((*args, *kwargs.values()))
        return func(*args, **kwargs)


_looking: list[UsesElsewhere] = []  # those that are entered, on any thread
_OF_MEMORY = ("numpy", "tolist", "__dlpack__")
"""Methods by which a tensor's memory is read, and no operation tells of it."""


def _see_memory_reads() -> Callable[[], object]:
    # What is set in place of each method, and what a tensor's class itself had, if any.
    given = {name: (_seen(getattr(Tensor, name)), vars(Tensor).get(name)) for name in _OF_MEMORY}
    for name, (seen, _) in given.items():
        setattr(Tensor, name, seen)

    def end() -> None:
        for name, (seen, own) in given.items():
            _give_back(name, seen, own)

    return end


memory_reads_seen = SetForAll(_see_memory_reads)
"""Lets what reads the memory of tensors past torch be seen for a while; see `UsesElsewhere`."""


def _seen(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def seen(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        for looks in tuple(_looking):
            with suppress(RuntimeError):  # a tensor of some kinds has no memory
                looks.look([tensor])
        return method(tensor, *args, **kwargs)

    return seen


def _give_back(name: str, seen: Callable[..., Any], own: Any) -> None:
    """Let a tensor's class have its method again, unless another library has set one meanwhile."""
    if vars(Tensor).get(name) is not seen:
        return
    if own is None:
        delattr(Tensor, name)
    else:
        setattr(Tensor, name, own)


@functools.cache
def reads_values(operation: Any) -> bool:
    """Return whether an operation does not read forms alone, as `empty_like` and its kin do."""
    forms = any(each in operation.name() for each in ("_like", "::new_"))
    return not getattr(operation, "is_view", False) and not forms  # a view reads nothing


def _addresses(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.sparse_coo:
                yield from _addresses((value._indices(), value._values()))
            else:
                yield value.data_ptr()
        elif isinstance(value, list | tuple | dict):
            yield from _addresses(tree_leaves(value))


class ReadsElsewhere(Watch):
    """Notes the parameters that operations read while another shard than their owner runs.

    Attributes:
        found: the first shard that read each of them, by their names.

    Args:
        memory: the name of each parameter by where its value lies.
        owner: the shard of each parameter.
        shard: returns the shard that runs.
    """

    def __init__(
        self, memory: Mapping[int, str], owner: Mapping[str, int], shard: Callable[[], int]
    ) -> None:
        super().__init__()
        self.found: dict[str, int] = {}
        self._memory = memory
        self._owner = owner
        self._shard = shard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not getattr(func, "is_view", False):  # a view reads nothing
            for storage in storages_of((*args, *kwargs.values())):
                name = self._memory.get(storage.data_ptr())
                if name is not None and self._owner[name] != (shard := self._shard()):
                    self.found.setdefault(name, shard)
        return func(*args, **kwargs)


def first_read_elsewhere(
    model: nn.Module,
    owners: Mapping[str, int],
    gone: Collection[str],
    shard: Callable[[], int],
    forward: Callable[[], object],
) -> str | None:
    """Return a parameter that a forward reads while its shard is not here, if there is one.

    The forward runs again without any values, and only for this, because what follows is an error.

    Args:
        owners: the shard of each parameter.
        gone: the parameters whose shards have left.
        shard: returns the shard that runs.
    """
    owners = {name: owner for name, owner in owners.items() if name in gone or owner}
    if not owners:
        return None  # one shard has all
    with ParameterValues.absent(model).in_use(), torch.no_grad():
        memory = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        found = ReadsElsewhere(
            {at: name for at, name in memory.items() if name in owners}, owners, shard
        )
        with suppress(Exception), found, plain_branches():  # without values it may fail
            forward()
    early = {name: first for name, first in found.found.items() if first < owners[name]}
    return next(iter(early | {name: 0 for name in found.found if name in gone}), None)


def storages_of(values: Iterable[Any]) -> Iterator[UntypedStorage]:
    """Yield the memory of each tensor in values, of a sparse one that of its parts."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.sparse_coo:
                yield from storages_of((value._indices(), value._values()))
            else:
                yield value.untyped_storage()
        elif isinstance(value, UntypedStorage):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from storages_of(tree_leaves(value))
