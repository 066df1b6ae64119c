"""Finds out whether a factory makes the same trial each time that it is called.

Each worker builds a trial by itself, so that only parameters, buffers and optimizer state are those
that another worker has left.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.recipe.attributes import kept_attributes
from cerebro_hydra.shards.admission.effects.after_steps import ExampleBatch, plain_trainer
from cerebro_hydra.shards.admission.effects.held_state import OF_OPTIMIZER, OF_SCHEDULER
from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory
from cerebro_hydra.shards.admission.effects.readings import Reading, changed, name_of
from cerebro_hydra.shards.admission.effects.value_texts import tensor_text
from cerebro_hydra.shards.admission.trial_code import read_trial, rebuilt
from cerebro_hydra.shards.cut.sample import Example
from cerebro_hydra.shards.engine.differences import checksums, contents
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.trial_code import TrialCode, is_setting

_MOST_TOLD = 3
_MOST_BUILDS = 4
_OF_SCHEDULE = f"a value{OF_SCHEDULER}"


class SameBuilds:
    """Builds trials, one of each kind twice, by a factory that is to make the same each time.

    Args:
        factory: the user's, which the builds call.
    """

    def __init__(self, factory: IsolatedFactory) -> None:
        self._factory = factory
        self._alike = set[str]()  # the kinds that were built twice

    def first(self, build: Callable[[], Recipe]) -> Recipe:
        """Return the first recipe; if that leaves something for later ones, the second.

        Raises:
            ConfigurationError: as of `of`.
        """
        recipe = self._imported(build)
        if not self._factory.has_left:
            return recipe
        drawn = _Drawn.by(recipe)
        del recipe  # two models at a time may be too large
        gc.collect()
        recipe = build()
        self._check(drawn, _Drawn.by(recipe))
        return recipe

    def of(
        self, build: Callable[[], Recipe], example: Callable[[Recipe], Example], trial_seed: int
    ) -> tuple[Recipe, TrialCode | None]:
        """Return a trial's recipe and its code, None if its objects can't be read.

        Of trials that differ in settings and options of the optimizer alone one is built twice.

        Args:
            build: builds the trial.
            example: returns what it sees.

        Raises:
            ConfigurationError: the factory makes another trial each time, or gives the first ones
                other weights than they have alone.
        """
        recipe = self._imported(build)
        if (read := read_build(recipe)) is None:
            return recipe, None
        before, code = read
        if (key := kind_of_build(before)) in self._alike:
            return recipe, code
        drawn = _Drawn.by(recipe)
        del recipe
        gc.collect()
        recipe = build()
        drawn_now = _Drawn.by(recipe)
        if (read := read_build(recipe)) is not None:
            check_same_builds(before, read[0], build, example(recipe), trial_seed)
        self._check(drawn, drawn_now)
        self._alike.add(key)
        return recipe, code

    def _imported(self, build: Callable[[], Recipe]) -> Recipe:
        """Return a recipe that was built where the modules that its factory imports were there.

        What these draw when they are imported moves no random number of a trial then.
        """
        recipe = build()
        if self._factory.has_imported:
            del recipe
            gc.collect()
            recipe = build()
        return recipe

    def _check(self, drawn: _Drawn, later: _Drawn) -> None:
        try:
            drawn.check(later)
        except ConfigurationError:
            self._factory.undo()  # else the next trial would find what the first one has made
            raise


class _Drawn(NamedTuple):
    """Tells which random numbers a build has drawn, and what that gave."""

    position: bytes
    weights: list[int]

    @classmethod
    def by(cls, recipe: Recipe) -> _Drawn:
        """Look at a trial that was just built; a file may have what its model begins with."""
        position = torch.get_rng_state().numpy().tobytes()
        tensors = [] if recipe.warm_start is not None else [*_tensors(recipe.model)]
        return cls(position, checksums([each for _, each in tensors if not is_lazy(each)]))

    def check(self, later: _Drawn) -> None:
        """Refuse weights that are others because the first build alone has drawn some numbers.

        Raises:
            ConfigurationError: they are.
        """
        if self.position != later.position and self.weights != later.weights:
            raise ConfigurationError(
                "estimator_gen_fn draws random numbers in its first call that it does not draw in "
                "its second one, as where it builds a teacher once for all trials, so that models "
                "begin with other weights than alone; do it in `with torch.random.fork_rng():`"
            )


def read_build(recipe: Recipe) -> tuple[Reading, TrialCode] | None:
    """Return what a trial that was just built has beside what hops, and its code.

    It is None if its objects can't be read.
    """
    if (read := read_trial(recipe)) is None:
        return None
    reader, code = read
    buffers = {f"buffer {n!r}": tensor_text(each) for n, each in rebuilt(recipe.model)}
    return {**reader.found, **code.parts, **buffers}, code


def kind_of_build(reading: Reading) -> str:
    """Return what builds have in common that differ in settings and options of the optimizer."""
    beside = sorted(
        (path, text)
        for path, text in reading.items()
        if not (is_setting(path) or OF_OPTIMIZER in name_of(path))
    )
    return digest(repr(beside).encode(errors="surrogatepass"))


def check_same_builds(
    before: Reading, now: Reading, build: Callable[[], Recipe], example: Example, trial_seed: int
) -> None:
    """Check that two trials that were built alike train alike.

    Values may differ in them, such as a time stamp, if they change no bit of two steps and of an
    evaluation, which begin with the same parameters and buffers. Settings may not, nor what an LR
    schedule has, which may act later.

    Args:
        before: the reading of one of them.
        now: the reading of the other.
        build: builds one more.

    Raises:
        ConfigurationError: they don't; the message names what differs.
    """
    if not (names := changed(before, now)):
        return
    settings = {name for name in map(name_of, names) if is_setting(name) or name == _OF_SCHEDULE}
    if not settings and _train_alike(names, build, example, trial_seed):
        return
    differing = sorted(settings or set(map(name_of, names)))
    more = f" and {len(differing) - _MOST_TOLD} more" if len(differing) > _MOST_TOLD else ""
    raise ConfigurationError(
        "estimator_gen_fn makes another trial each time that it is called, and each worker calls "
        f"it: {', '.join(differing[:_MOST_TOLD])}{more} differ, and so does what a step computes. "
        "Draw random numbers from the global generators of torch, NumPy or Python, which are "
        "seeded before it is called; seed a generator of your own, as np.random.default_rng(0); "
        "begin counts of classes and globals anew in it, as Block.count = 0; or keep what was "
        "drawn in a persistent buffer, which hops"
    )


def _train_alike(
    names: Collection[str], build: Callable[[], Recipe], example: Example, trial_seed: int
) -> bool:
    """Return whether two builds give the same from equal states on.

    They differ in something of these names, if a few builds have it. They may share modules.
    """
    first = build()
    before, state = read_build(first), state_of(first.model)
    expected = trained(first, state, example, trial_seed)
    del first  # with what its steps have made, as large as the model
    gc.collect()
    for _ in range(_MOST_BUILDS):
        second = build()
        now = read_build(second)
        if before is None or now is None or changed(before[0], now[0]) & set(names):
            break
    own, forms = state_of(second.model), [{n: t.shape for n, t in state.items()}]
    forms.append({name: tensor.shape for name, tensor in own.items()})
    if forms[0] != forms[1]:
        return False
    own = state | {name: own[name] for name, _ in rebuilt(second.model)}
    found = trained(second, own, example, trial_seed)
    return None in (expected, found) or expected == found


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in _tensors(model)}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())


def trained(
    recipe: Recipe, state: Mapping[str, Tensor], example: Example, trial_seed: int
) -> object:
    """Return what two steps from a state and an evaluation give; the model has that state then.

    It is None where they fail, which is told elsewhere.
    """
    window = [ExampleBatch.of(example)]
    _give(recipe.model, state)
    try:
        with kept_attributes(recipe.model):
            recipe.take_form(example)
            trainer = plain_trainer(recipe, trial_seed)
            losses = [trainer.train([window]) for _ in range(2)]
            RandomKey(trial_seed, 0, 0).reseed("evaluation")
            return repr((losses, trainer.evaluate(window))), contents(trainer.tensors())
    except Exception:
        return None
    finally:
        _give(recipe.model, state)
        recipe.model.zero_grad()


def _give(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(model):
            if name in state:  # a step may have made a buffer
                tensor.copy_(state[name])
