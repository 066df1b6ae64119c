"""A cache that trials of a process share is found if it fills late, or by what each process has."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.policy.audit_budget import AuditBudget
from cerebro_hydra.shards.admission.effects.evaluation_effects import LateEvaluation
from cerebro_hydra.shards.admission.effects.filled_caches import FilledCaches
from cerebro_hydra.shards.admission.effects.late_effects import EarlierReadings
from cerebro_hydra.shards.admission.effects.named_by_code import names_where_written
from tests.shards import zoo
from tests.shards.hopping import Trial, start
from tests.shards.trials import made as made_in_shards

made = functools.partial(made_in_shards, shards=1)
BATCHES = zoo.singly(zoo.vectors(8, 8))
LATE = "CEREBRO_HYDRA_TESTS_" + "LATE"  # as the environment is named, no reading finds it


class Memo:
    """Keeps something, in an object."""

    def __init__(self) -> None:
        self.kept: dict[Any, float] = {}
        self.known = 1

    norm: float


not_empty = {"known": 1.0}
of_thread = threading.local()
of_process: dict[Any, float] = {}
of_modules: MutableMapping[nn.Module, float] = weakref.WeakKeyDictionary()
memo = Memo()
made_late: float | None


@pytest.fixture(autouse=True)
def early() -> Iterator[None]:
    yield
    os.environ.pop(LATE, None)
    globals().pop("made_late", None)
    not_empty.pop("norm", None)
    for holder in (memo, of_thread):
        vars(holder).pop("norm", None)
    if "late_norm" in vars(OnItsClass):
        del OnItsClass.late_norm
    for each in (of_process, of_modules, memo.kept, InItsClass.kept):
        each.clear()
    for function in (of_module, of_tensor):
        function.cache_clear()


def is_late() -> bool:
    return LATE in os.environ


def norm(weight: Tensor) -> float:
    return float(weight.detach().norm())


@functools.lru_cache
def of_module(module: nn.Linear) -> float:
    return norm(module.weight)


@functools.lru_cache
def of_tensor(weight: Tensor) -> float:
    return norm(weight)


class Scaled(zoo.Net):
    """Scales its input by what a cache has of its weights, once it is late."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.cached() if self.acts() else x)

    def acts(self) -> bool:
        return self.training and is_late()

    def cached(self) -> float:
        return of_process.setdefault("norm", norm(self.b.weight))


class ByATensor(Scaled):
    def cached(self) -> float:
        return of_process.setdefault(self.b.weight, norm(self.b.weight))


class ByAnAddress(Scaled):
    def cached(self) -> float:
        return of_process.setdefault(self.b.weight.data_ptr(), norm(self.b.weight))


class InItsClass(Scaled):
    kept: dict[str, float] = {}  # noqa: RUF012

    def cached(self) -> float:
        return self.kept.setdefault("norm", norm(self.b.weight))


class InAnObject(Scaled):
    def cached(self) -> float:
        return memo.kept.setdefault("norm", norm(self.b.weight))


class InAWeakDict(Scaled):
    def cached(self) -> float:
        return of_modules.setdefault(self.b, norm(self.b.weight))


class InANewGlobal(Scaled):
    def cached(self) -> float:
        global made_late
        try:
            return made_late
        except NameError:
            made_late = norm(self.b.weight)
            return made_late


class ByAFunction(Scaled):
    def cached(self) -> float:
        return of_module(self.b)


class ByAFunctionOfATensor(Scaled):
    def cached(self) -> float:
        return of_tensor(self.b.weight)


class ByAProperty(Scaled):
    @functools.cached_property
    def norm(self) -> float:
        return norm(self.b.weight)

    def cached(self) -> float:
        return self.norm


class LateLoss(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, float] = {}

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(outputs, labels)
        return loss / self.kept.setdefault("loss", loss.item()) if is_late() else loss


class InASharedDict(Scaled):
    def cached(self) -> float:
        return not_empty.setdefault("norm", norm(self.b.weight))


class OnAGlobalObject(Scaled):
    def cached(self) -> float:
        memo.norm = norm(self.b.weight)
        return memo.norm


class OnAThread(Scaled):
    def cached(self) -> float:
        of_thread.norm = norm(self.b.weight)
        return float(of_thread.norm)


class OnItsClass(Scaled):
    known = 1
    late_norm: float

    def cached(self) -> float:
        type(self).late_norm = norm(self.b.weight)
        return float(type(self).late_norm)


class LossWithNewValues(LateLoss):
    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.CrossEntropyLoss.forward(self, outputs, labels)
        if is_late() and not hasattr(self, "low"):
            self.low = loss.item()
        return loss / getattr(self, "low", 1.0)


class LossWithNewBuffer(LateLoss):
    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.CrossEntropyLoss.forward(self, outputs, labels)
        if is_late() and not hasattr(self, "mean"):
            self.register_buffer("mean", loss.detach().clone())
        return loss / getattr(self, "mean", 1.0)


class LossByAName(LateLoss):
    def __init__(self) -> None:
        super().__init__()
        self.kept["weight"] = 1.0


Make = Callable[[], Any]
LATE_CACHES: dict[str, tuple[Make, str]] = {
    "a global dict": (made(Scaled), r"global variable 'of_process' of .* at \['norm'\]"),
    "by a tensor": (made(ByATensor), r"'of_process' of .* at \[parameter 'b.weight'\]"),
    "by an address": (made(ByAnAddress), r"'of_process' of .* at \[\d+\]"),
    "of a class": (made(InItsClass), r"attribute 'kept' of class .* at \['norm'\]"),
    "of an object": (made(InAnObject), r"global variable 'memo' of .* at \.kept\['norm'\]"),
    "a weak dict": (made(InAWeakDict), r"'of_modules' of .* at \[module 'b'\]"),
    "a new global": (made(InANewGlobal), r"global variable 'made_late' of"),
    "of a function": (made(ByAFunction), r"global variable 'of_module' of .* at \.cache"),
    "by a function of a tensor": (made(ByAFunctionOfATensor), r"'of_tensor' of .* at \.cache"),
    "a property": (made(ByAProperty), "attribute 'norm' of the model"),
    "a shared dict": (made(InASharedDict), r"'not_empty' of .* at \['norm'\]"),
    "a new value of an object": (made(OnAGlobalObject), r"variable 'memo' of .* at \.norm"),
    "a new value of a thread": (made(OnAThread), r"variable 'of_thread' of .* at \.norm"),
    "a new value of a class": (made(OnItsClass), r"attribute 'late_norm' of class .*OnItsClass"),
    "a new value of a loss": (made(zoo.Net, lambda _: LossWithNewValues()), "'low' of the loss"),
    "a new buffer of a loss": (made(zoo.Net, lambda _: LossWithNewBuffer()), "buffer 'mean' of"),
    "a new name of a loss": (made(zoo.Net, lambda _: LossByAName()), r"'kept' .* at \['loss'\]"),
    "of a loss": (made(zoo.Net, lambda _: LateLoss()), r"'kept' of the loss at \['loss'\]"),
}


@pytest.mark.parametrize("what", LATE_CACHES)
def test_a_cache_that_fills_only_late_fails_its_trial_by_name(what: str) -> None:
    make, name = LATE_CACHES[what]
    trial = start(make(), BATCHES)
    trial.train(BATCHES)
    os.environ[LATE] = "1"
    with pytest.raises(ConfigurationError, match=f"training changed .*{name}.*, as it did not in"):
        trial.train(BATCHES)


class AtOnce:
    def acts(self) -> bool:
        return self.training  # type: ignore[attr-defined]


class InEvaluation:
    def acts(self) -> bool:
        return not self.training  # type: ignore[attr-defined]


@pytest.mark.parametrize("when", [AtOnce, InEvaluation])
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Scaled, r"\['norm'\]"), (ByAnAddress, r"\[the address of 'b.weight'\]"),
        (InAnObject, r"\.kept\['norm'\]"), (ByAFunctionOfATensor, r"\.cache\[\(parameter 'b"),
    ],
)  # fmt: skip
def test_a_cache_of_weights_is_refused_by_whatever_key(
    model: type[Scaled], name: str, when: type
) -> None:
    told = rf"at {name}.* is a cache of what depends on weights or rows"
    with pytest.raises(ConfigurationError, match=told):
        start(made(type("Model", (when, model), {}))(), BATCHES)


first_rows: list[Tensor] = []


class OfFirstRows(zoo.Net):
    """Keeps what it makes in its first step for all that come."""

    def made(self, x: Tensor) -> Tensor:
        return x.mean(0)

    def forward(self, x: Tensor) -> Tensor:
        if not first_rows:
            first_rows.append(self.made(x))
        return super().forward(x - first_rows[0])


class OfNoRows(OfFirstRows):
    def made(self, x: Tensor) -> Tensor:
        return torch.full_like(x[0], 0.5)


cell: list[Tensor | None] = [None]
cells: dict[int, Tensor | None] = {1: None}


class InAnItem(zoo.Net):
    def forward(self, x: Tensor) -> Tensor:
        if cell[0] is None:
            cell[0] = x.mean(0)
        return super().forward(x - cell[0])


class InAnEntry(zoo.Net):
    def forward(self, x: Tensor) -> Tensor:
        if cells[1] is None:
            cells[1] = x.mean(0)
        return super().forward(x - cells[1])


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (OfFirstRows, r"first_rows'.*\[0\]"),
        (InAnItem, r"cell'.*\[0\]"),
        (InAnEntry, r"cells'.*\[1\]"),
    ],
)
def test_what_the_first_rows_leave_in_a_list_or_a_dict_is_refused(
    model: type[nn.Module], name: str
) -> None:
    told = rf"global variable '{name} is a cache of what depends on weights or rows"
    with pytest.raises(ConfigurationError, match=told):
        start(made(model)(), BATCHES)
    first_rows.clear()
    start(made(OfNoRows)(), BATCHES).train(BATCHES)
    first_rows.clear()


class KeepsNorms(zoo.Net):
    """Keeps by a hook, in each step, what none reads; that of its first layer is of the rows."""

    def add(self) -> None:
        self.norms: dict[int, Tensor] = {}
        for number, layer in enumerate((self.a, self.b)):
            layer.register_forward_pre_hook(
                lambda module, args, n=number: self.norms.__setitem__(n, args[0].detach().norm())
            )


class KeepsTheFirst(KeepsNorms):
    def forward(self, x: Tensor) -> Tensor:
        if 2 not in self.norms or is_late():
            self.norms[2] = x.norm() + is_late()
        return super().forward(x) * self.norms[2]


def test_entries_that_each_step_sets_anew_may_follow_from_its_rows() -> None:
    trial = start(made(KeepsNorms)(), BATCHES)
    trial.train(zoo.singly(zoo.vectors(8, 8, seed=1)))
    with pytest.raises(ConfigurationError, match="norms"):
        start(made(KeepsTheFirst)(), BATCHES).train(BATCHES)


class LateInEvaluation(Scaled):
    def acts(self) -> bool:
        return not self.training and is_late()


def evaluated(trial: Trial) -> None:
    known = trial.admission.attributes, trial.admission.set_in_evaluation
    effects = LateEvaluation(trial.runtime(), *known, AuditBudget(1.0), EarlierReadings())
    effects.begin()
    trial.evaluate(zoo.vectors(8))
    effects.check((), draws=False)


def test_a_cache_that_fills_late_in_evaluation_fails_its_trial_by_name() -> None:
    trial = start(made(LateInEvaluation)(), BATCHES)
    evaluated(trial)
    os.environ[LATE] = "1"
    with pytest.raises(ConfigurationError, match=r"evaluation changed global .*'of_process'"):
        evaluated(trial)


def test_a_cache_that_another_trial_of_the_process_has_filled_at_once_may_fill() -> None:
    class Fills(zoo.Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * of_process.setdefault(len(x), 1.0))

    class ByRows(LateInEvaluation):
        def cached(self) -> float:
            return of_process.setdefault(4, norm(self.b.weight))

    plain = start(made(ByRows)(), BATCHES)
    other = start(made(Fills)(), BATCHES)
    other.train(BATCHES)
    of_process.clear()
    os.environ[LATE] = "1"
    evaluated(plain)


class ByItsLength(zoo.Net):
    """Keeps something by each row in a dict, and asks how many there are."""

    MOST = 60

    def __init__(self, kept: dict[Any, float] | None = None) -> None:
        super().__init__()
        self.kept = {} if kept is None else kept

    def forward(self, x: Tensor) -> Tensor:
        self.kept.update({key: 1.0 for key in self.keys(x)})
        return super().forward(x) * (1.0 if len(self.kept) < self.MOST else 1.5)

    def keys(self, x: Tensor) -> list[Any]:
        return [round(value, 3) for value in x[:, 0].tolist()]


class InAGlobalByTuples(ByItsLength):
    def __init__(self) -> None:
        super().__init__(of_process)

    def keys(self, x: Tensor) -> list[Any]:
        return [(str(value), 0) for value in x[:, 0].tolist()]


class Emptied(ByItsLength):
    """Keeps no more than some, and computes with none."""

    MOST = 1 << 30

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        while len(self.kept) > 10:
            self.kept.pop(next(iter(self.kept)))
        return h


class AddsUp(ByItsLength):
    """Has the same few entries in each step."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.kept |= {"first": 0.5, "last": h.detach().mean().item()}
        return zoo.Net.forward(self, x) * sum(self.kept.values())


def counts_labels(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    seen: set[int] = set()

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.update(labels.tolist())
        return nn.functional.cross_entropy(outputs, labels) * len(seen)

    return loss


def knows_labels(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    seen: set[int] = set()

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.update(labels.tolist())
        return nn.functional.cross_entropy(outputs, labels)

    return loss


@pytest.mark.parametrize("model", [ByItsLength, InAGlobalByTuples])
def test_a_dict_whose_length_acts_late_is_refused(model: type[nn.Module]) -> None:
    with pytest.raises(ConfigurationError, match=r"(attribute 'kept'|'of_process').*, which is no"):
        start(made(model)(), BATCHES)


@pytest.mark.parametrize("model", [Emptied, AddsUp])
def test_a_dict_whose_length_is_of_no_use_to_a_step_trains(model: type[nn.Module]) -> None:
    start(made(model)(), BATCHES).train(BATCHES)


def test_a_loss_that_counts_the_labels_so_far_is_refused_and_one_that_keeps_them_trains() -> None:
    with pytest.raises(ConfigurationError, match=r"value of the loss at \.seen, which is no part"):
        start(made(zoo.Net, loss=counts_labels)(), BATCHES)
    start(made(zoo.Net, loss=knows_labels)(), BATCHES).train(BATCHES)


def test_of_many_dicts_few_are_filled_with_more_and_first_those_that_have_grown() -> None:
    rows = {f"row {number:04}": {"number": number} for number in range(2_000)}
    known = {path: ["number"] for path in rows}
    rows["row 1999"]["late"] = 1
    caches = FilledCaches([], rows, known, lambda path: True, {}, [])
    caches.empty()
    caches.crowd(rows)
    filled = [path for path, row in rows.items() if len(row) > 2]
    assert "row 1999" in filled and len(filled) < 50
    caches.fill()
    assert sum(map(len, rows.values())) == 2_001


class MakesAtOnce(zoo.Net):
    """Makes what all processes make alike, where there is none yet."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(memo, "norm"):
            memo.norm = 2.0
        return super().forward(x * memo.norm * not_empty.setdefault("norm", 2.0))


def test_what_was_made_before_admission_may_be_made_in_a_process_that_lacks_it() -> None:
    memo.norm = not_empty["norm"] = 2.0  # as someone has who called the model
    trial = start(made(MakesAtOnce)(), BATCHES)
    del memo.norm, not_empty["norm"]
    trial.train(BATCHES)
    assert (memo.norm, not_empty["norm"]) == (2.0, 2.0)


FLAGS: dict[str, Any] = {}


class Flagged(zoo.Net):
    """Sets an entry in some calls, and computes otherwise once it is there."""

    def __init__(self, sets: Callable[[nn.Module, Tensor], bool]) -> None:
        super().__init__()
        self.sets = sets

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if self.sets(self, found):
            FLAGS["low"] = 1
        return found * (0.5 if "low" in FLAGS else 1.0)


class Tables(zoo.Net):
    """Looks up tables by names of their own, also in evaluations alone."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            FLAGS.setdefault("evaluated", torch.ones(()))
        if "trained" not in FLAGS:
            FLAGS["trained"] = torch.ones(())
        return super().forward(x * FLAGS["trained"])


@pytest.mark.parametrize(
    "sets",
    [lambda model, found: not model.training, lambda model, found: not torch.is_grad_enabled()],
    ids=["evaluating", "without gradients"],
)
def test_a_flag_in_a_dict_that_only_an_evaluation_sets_at_admission_is_refused(
    sets: Callable[[nn.Module, Tensor], bool],
) -> None:
    FLAGS.clear()
    for _ in range(2):  # what the first admission leaves is no excuse for the second one
        with pytest.raises(ConfigurationError, match=r"global variable 'FLAGS' of .*\['low'\]"):
            start(made(lambda: Flagged(sets))(), BATCHES)


def test_tables_by_names_of_their_own_are_admitted() -> None:
    FLAGS.clear()
    start(made(Tables)(), BATCHES).train(BATCHES)
    start(made(Tables)(), BATCHES).train(BATCHES)


class Words:
    """Keeps what it has looked up, as tokenizers do."""

    def __init__(self) -> None:
        self.numbers = {f"word {number}": 1.0 + number for number in range(9)}
        self.cache: dict[str, float] = {}

    def number(self, word: str) -> float:
        if word not in self.cache:
            self.cache[word] = self.numbers.get(word, 1.0)
        return self.cache[word]


WORDS = Words()


class Speaks(zoo.Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * WORDS.number(f"word {x.shape[1]}"))


def test_a_table_beside_a_cache_that_is_filled_from_it_is_no_cache() -> None:
    start(made(Speaks)(), BATCHES).train(BATCHES)


class Writes:
    """Sets entries in some ways."""

    def of_attribute(self, word: str) -> None:
        self.cache[word] = self.table[word]  # type: ignore[attr-defined]

    def of_global(self, word: str) -> None:
        not_empty[word] = of_process[word]

    def by_method(self, word: str) -> None:
        self.cache.setdefault((word, len(word)), self.table.get(word))  # type: ignore[attr-defined]

    def of_local(self, word: str) -> None:
        cache = self.cache  # type: ignore[attr-defined]
        cache[word] = self.table[word]  # type: ignore[attr-defined]

    def of_either(self, word: str) -> None:
        (self.cache if word else self.others)[word] = 1  # type: ignore[attr-defined]

    def reads(self, word: str) -> float:
        return self.cache[word] + self.table[word]  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (Writes.of_attribute, {"cache"}),
        (Writes.of_global, {"not_empty"}),
        (Writes.by_method, {"cache"}),
        (Writes.of_local, {"cache", "table"}),
        (Writes.of_either, {"cache", "others"}),
        (Writes.reads, set()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_entries_are_set_of_what_stands_before_them_and_of_anything_if_that_is_local(
    method: Callable[..., Any], names: set[str]
) -> None:
    assert names_where_written(method.__code__) == names


class Logged:
    """Is what a program logs to, which no process can send to another."""

    def __init__(self, path: Path) -> None:
        self.steps, self.file = 0, path.open("w")


LOGS: Any = SimpleNamespace(to=None)


class Logs(zoo.Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def log(self, text: str) -> None:
        LOGS.to.file.write(text)


def test_a_config_may_hold_what_can_not_be_read(tmp_path: Path) -> None:
    LOGS.to = Logged(tmp_path / "log")
    with LOGS.to.file:
        start(made(Logs)(), BATCHES).train(BATCHES)
    LOGS.to = None
