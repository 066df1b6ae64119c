"""What reads a model's memory by another name than the model's own is refused by the tensor's name.

Plainly it would see each update. A shard that is bound to other memory leaves it as it was.
"""

from __future__ import annotations

import functools
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.objective.step_module import StepBatch
from cerebro_hydra.shards.admission.admit import admit, on_disk
from cerebro_hydra.shards.cut.second_names import SecondNames, on_copies
from tests.shards import plain, zoo
from tests.shards.hopping import start
from tests.shards.trials import COLUMNS, made, scaler

WINDOWS = zoo.singly(zoo.vectors(8, 8))
kept: dict[str, Tensor] = {}


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    kept.clear()


def net() -> nn.Sequential:
    layers = (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    return nn.Sequential(*layers)


def hooked(second: Callable[[nn.Sequential], Tensor]) -> Callable[[], nn.Module]:
    """Return what makes a model with a hook that closes over a tensor."""

    def make() -> nn.Module:
        model = net()
        taken = second(model)
        model[3].register_forward_hook(lambda module, given, output: output + taken)
        return model

    return make


def with_array() -> nn.Module:
    model = net()
    taken = model[0].bias.detach().numpy()
    model[3].register_forward_hook(lambda module, given, out: out + torch.from_numpy(taken))
    return model


class InAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.taken = {"bias": [self.layers[0].bias.data]}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.taken["bias"][0])


def in_a_global() -> nn.Module:
    model = net()
    kept["bias"] = model[0].bias.detach()
    model[3].register_forward_hook(lambda module, given, output: output + kept["bias"])
    return model


def compared() -> nn.Module:
    """Reads what it takes in a comparison alone, which swallows NaN."""
    model = net()
    taken = model[0].bias.data
    model[3].register_forward_hook(lambda m, given, out: out * (2.0 if taken.sum() > 9 else 1.0))
    return model


class InEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        taken = self.layers[0].bias.data
        self.look = lambda x: x + taken

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x if self.training else self.look(x))


def weakly() -> nn.Module:
    model = net()
    taken = weakref.ref(model[1].running_mean)
    model[3].register_forward_hook(lambda module, given, output: output + taken())
    return model


class KeptByAForward(nn.Module):
    """Keeps a view of a parameter from its first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.view: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.view is None:
            self.view = self.layers[0].bias.data
        return self.layers(x + self.view)


class KeepsABuffer(nn.Module):
    """Keeps a buffer itself, from the first step on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    @functools.cached_property
    def mean(self) -> Tensor:
        return self.layers[1].running_mean

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.mean if self.training else x)


class KeptInAClosure(nn.Module):
    """Keeps, in training alone, a view where no attribute of a module shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        views: list[Tensor] = []
        self.views = lambda: views

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.views():
            self.views().append(self.layers[0].bias.detach())
        return self.layers(x + self.views()[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "data": (hooked(lambda m: m[0].bias.data), r"parameter '0\.bias'"),
    "detached": (hooked(lambda m: m[0].weight.detach()[0]), r"parameter '0\.weight'"),
    "array": (with_array, r"parameter '0\.bias'"),
    "buffer": (hooked(lambda m: m[1].running_mean), r"buffer '1\.running_mean'"),
    "view of a buffer": (hooked(lambda m: m[1].running_mean[:6]), r"buffer '1\.running_mean'"),
    "weak reference": (weakly, r"buffer '1\.running_mean'"),
    "attribute": (InAttributes, r"parameter 'layers\.0\.bias'"),
    "global": (in_a_global, r"parameter '0\.bias'"),
    "comparison": (compared, r"parameter '0\.bias'"),
    "evaluation": (InEvaluation, r"parameter 'layers\.0\.bias'"),
    "forward": (KeptByAForward, r"parameter 'layers\.0\.bias'"),
    "buffer itself": (KeepsABuffer, r"buffer 'layers\.1\.running_mean'"),
    "closure": (KeptInAClosure, r"parameter 'layers\.0\.bias'"),
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("model", "told"), MODELS.values(), ids=MODELS)
def test_a_second_name_that_is_read_is_refused(
    model: Callable[[], nn.Module], told: str, shards: int
) -> None:
    with pytest.raises(ConfigurationError, match=rf"reads {told} by another name, .*Refer to the"):
        start(made(model, shards=shards)(), WINDOWS)


class Distance(nn.Module):
    """A loss that has a buffer of the model as its own."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels) + self.mean.square().sum()


def of_weights(model: nn.Sequential) -> Callable[[Tensor, Tensor], Tensor]:
    taken = model[4].weight.detach()
    return lambda outputs, labels: F.cross_entropy(outputs, labels) + taken.square().sum()


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda model: Distance(model[1].running_mean), r"buffer '1\.running_mean'"),
        (of_weights, r"parameter '4\.weight'"),
    ],
)
def test_a_loss_that_reads_one_is_refused(loss: Callable[..., object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=f"reads {told} by another name"):
        start(made(net, loss)(), WINDOWS)


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("first", [0, 1, 9])
def test_an_lr_lambda_that_reads_one_is_refused(first: int, interval: str) -> None:
    def make() -> Recipe:
        model = net()
        taken = model[4].bias.data
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
            return LambdaLR(optimizer, lambda n: 1 + taken.sum().item() if n >= first else 1.0)

        return Recipe(
            model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=schedule, lr_interval=interval
        )

    with pytest.raises(ConfigurationError, match=r"reads parameter '4\.bias' by another name"):
        start(make(), WINDOWS)


def keeps_one(model: nn.Module, tensor: Callable[[nn.Module], Tensor]) -> Callable[[], Tensor]:
    """Return what gives a tensor of the model as the first call has seen it."""
    views: list[Tensor] = []

    def first_seen() -> Tensor:
        if not views:
            views.append(tensor(model))
        return views[0]

    return first_seen


FIRST_SEEN = [
    (lambda model: model[0].bias.detach(), r"parameter '0\.bias'"),
    (lambda model: model[1].running_mean, r"buffer '1\.running_mean'"),
]


@pytest.mark.parametrize("first", [0, 40])
@pytest.mark.parametrize(("tensor", "told"), FIRST_SEEN)
def test_what_a_training_step_keeps_of_its_first_call_is_refused(
    tensor: Callable[[nn.Module], Tensor], told: str, first: int
) -> None:
    model = net()
    first_seen = keeps_one(model, tensor)

    def step(model: nn.Module, batch: StepBatch, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        x, y = batch
        model.latest = F.cross_entropy(model(x), y)  # whose graph holds the weights
        optimizers[0].zero_grad()
        kept = first_seen().sum()
        reads = model[1].num_batches_tracked > first
        (model.latest * (1 + kept) if reads else model.latest).backward()
        optimizers[0].step()
        return model.latest

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(model, optimizer, F.cross_entropy, training_step=step).bind(COLUMNS)
    with pytest.raises(ConfigurationError, match=f"{'keeps' if first else 'reads'} {told} by"):
        start(recipe, WINDOWS)


@pytest.mark.parametrize(("tensor", "told"), FIRST_SEEN)
def test_what_a_hook_keeps_while_a_scale_is_sought_is_refused(
    tensor: Callable[[nn.Module], Tensor], told: str
) -> None:
    model = net()
    first_seen = keeps_one(model, tensor)
    model[3].register_forward_hook(lambda module, given, output: output + first_seen())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(
        model, optimizer, nn.CrossEntropyLoss(), autocast="float16", grad_scaler=scaler(4e5)
    )
    with pytest.raises(ConfigurationError, match=f"reads {told} by another name"):
        start(recipe, WINDOWS)


class Counting(nn.Module):
    """Counts its steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = self.looked(x, int(self.steps))
            self.steps += 1
        return self.layers(x)

    def looked(self, x: Tensor, step: int) -> Tensor:
        raise NotImplementedError


class ReadLate(Counting):
    """Keeps a view from its first step on, and reads it late."""

    def __init__(self, view: Callable[[nn.Parameter], object] = Tensor.detach) -> None:
        super().__init__()
        self.view, self.kept = view, {}

    def looked(self, x: Tensor, step: int) -> Tensor:
        if step == 0:
            self.kept["view"] = self.view(self.layers[3].bias)
        return x + torch.as_tensor(self.kept["view"]) if step > 6 else x


class InAClosureReadLate(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.first_seen = keeps_one(self.layers, lambda layers: layers[3].bias.data)

    def looked(self, x: Tensor, step: int) -> Tensor:
        kept = self.first_seen()
        return x + kept if step > 6 else x


class ABufferReadLate(Counting):
    def looked(self, x: Tensor, step: int) -> Tensor:
        if step == 1:
            self.kept = self.layers[1].running_mean
        return x + self.kept if step > 6 else x


class Refreshed(Counting):
    """Takes a view every few steps, and reads it in all of them."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def looked(self, x: Tensor, step: int) -> Tensor:
        if step % self.every == 0:
            self.kept = self.layers[3].bias.data
        return x + self.kept


class RefreshedOnParameter(Refreshed):
    def looked(self, x: Tensor, step: int) -> Tensor:
        bias = self.layers[3].bias
        if step % self.every == 0:
            bias.old = bias.data
        return x + bias.old


class RefreshedAndReadLate(RefreshedOnParameter):
    def looked(self, x: Tensor, step: int) -> Tensor:
        looked = super().looked(x, step)
        return looked if step > 6 else x


class RefreshedInAClosure(Refreshed):
    def __init__(self, every: int) -> None:
        super().__init__(every)
        views: list[Tensor] = [torch.zeros(6)]
        self.views = lambda: views

    def looked(self, x: Tensor, step: int) -> Tensor:
        if step % self.every == 0:
            self.views()[0] = self.layers[3].bias.data
        return x + self.views()[0]


KEPT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "view": (ReadLate, r"attribute 'kept' of .* at \['view'\] keeps parameter 'layers\.3\.bias'"),
    "array": (
        lambda: ReadLate(lambda p: p.detach().numpy()),
        r"attribute 'kept' of .* at \['view'\] keeps parameter 'layers\.3\.bias'",
    ),
    "closure": (
        InAClosureReadLate,
        r"\.first_seen|'first_seen' .* keeps parameter 'layers\.3\.bias'",
    ),
    "buffer": (ABufferReadLate, r"attribute 'kept' .* keeps buffer 'layers\.1\.running_mean'"),
    **{f"every {n}": (lambda n=n: Refreshed(n), r"parameter 'layers\.3\.bias'") for n in (2, 3, 4)},
    **{
        f"on a parameter, every {n}": (
            lambda n=n: RefreshedOnParameter(n),
            r"parameter 'layers\.3\.bias'",
        )
        for n in (2, 3, 4)
    },
    **{
        f"in a closure, every {n}": (
            lambda n=n: RefreshedInAClosure(n),
            r"parameter 'layers\.3\.bias'",
        )
        for n in (2, 3, 4)
    },
    "every other, read late": (
        lambda: RefreshedAndReadLate(2),
        r"attribute 'old' of parameter 'layers\.3\.bias' keeps parameter 'layers\.3\.bias'",
    ),
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("model", "told"), KEPT.values(), ids=KEPT)
def test_one_that_steps_keep_for_later_ones_is_refused(
    model: Callable[[], nn.Module], told: str, shards: int
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        start(made(model, shards=shards)(), WINDOWS)


class ReadsWhatMovesLate(nn.Module):
    """Adds what a small buffer has, by a second name, and begins to change it in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("shift", torch.zeros(6))
        taken = self.shift
        self.layers[3].register_forward_hook(lambda module, given, output: output + taken)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            if self.steps > 2:
                self.shift += 0.1
        return self.layers(x)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_small_buffer_with_a_second_name_that_begins_to_move_fails_by_name(shards: int) -> None:
    trial = start(made(ReadsWhatMovesLate, shards=shards)(), WINDOWS[:1])
    with pytest.raises(ConfigurationError, match="wrote to buffer 'shift', as none did"):
        trial.train(zoo.singly(zoo.vectors(8, 8, 8, 8)))


def unread() -> nn.Module:
    model = net()
    kept["bias"] = model[0].bias.data
    return model


class Frozen(nn.Module):
    """Closes over a parameter that no training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.layers[0].requires_grad_(False)
        taken = self.layers[0].bias.data
        self.layers[3].register_forward_hook(lambda module, given, output: output + taken)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Normed(nn.Module):
    """Has, as torch's older normalization does, a weight as an attribute until the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        nn.utils.spectral_norm(self.layers[3])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def named_twice() -> nn.Module:
    model = net()
    model[3].register_buffer("mean", model[1].running_mean)
    return model


class ViewedAnew(nn.Module):
    """Keeps a view of a parameter until the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        self.view = self.layers[0].bias.data
        return self.layers(x + self.view)


class ViewedInEvaluation(nn.Module):
    """Keeps a view until the next evaluation, where no module has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.box = net(), SimpleNamespace()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.box.view = self.layers[3].bias.data
        return self.layers(x) if self.training else self.layers(x) + self.box.view.sum()


class KeepsItsGraph(nn.Module):
    """Keeps its outputs until the next forward, and with their graph the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        self.outputs = self.layers(x)
        return self.outputs


class Recurrent(nn.Module):
    """Has flat weights, normed ones, a parametrized one and two that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 6)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.constrained = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.cells(x)
        with nn.utils.parametrize.cached():
            x = self.constrained(self.constrained(self.normed(x)))
        return self.last(self.other(self.one(x)))


@pytest.mark.parametrize("model", [net, unread, Frozen, Normed, ViewedAnew, named_twice, Recurrent])
def test_one_that_nobody_reads_or_that_stays_as_it_is_changes_nothing(
    model: Callable[[], nn.Module],
) -> None:
    trial = start(made(model)(), WINDOWS)
    assert trial.cut_model.num_shards == 2


@pytest.mark.parametrize(
    "model",
    [
        lambda: Refreshed(1),
        lambda: RefreshedOnParameter(1),
        lambda: RefreshedInAClosure(1),
        ViewedInEvaluation,
        KeepsItsGraph,
    ],
)
def test_one_that_is_set_anew_before_it_is_read_is_no_harm(model: Callable[[], nn.Module]) -> None:
    start(made(model)(), WINDOWS)


def unread_and_timed() -> nn.Module:
    model = unread()
    scale = lambda output: output * (1 + time.perf_counter_ns() % 9973)  # noqa: E731
    model[3].register_forward_hook(lambda module, given, output: scale(output))
    return model


class ViewedAnewAndCounted(ViewedAnew):
    def __init__(self) -> None:
        super().__init__()
        calls = [0]
        self.calls = lambda: calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls()[0] += self.training
        return super().forward(x) * self.calls()[0]


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (unread_and_timed, "can't be trained reproducibly, as .* the loss of step 0 is"),
        (ViewedAnewAndCounted, r"each step changes attribute 'calls' .* at \.calls\[0\]"),
    ],
)
def test_steps_that_differ_are_told_by_what_differs_where_a_second_name_is_no_harm(
    model: Callable[[], nn.Module], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        start(made(model)(), WINDOWS)


def test_memory_has_its_values_again() -> None:
    model = unread()
    names, before = SecondNames(model), [p.detach().clone() for p in model.parameters()]
    assert names.keys == {("parameter", "0.bias")}
    with names.overwritten(names.keys, torch.inf):
        assert model[0].bias.isinf().all()
    assert all(map(torch.equal, model.parameters(), before))
    assert not SecondNames(net()).keys


def test_one_is_found_where_a_models_parameters_go_to_disk() -> None:
    recipe = made(hooked(lambda model: model[0].bias.data))()
    (batch,) = WINDOWS[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        on_disk(recipe, folder, resident=1 << 20),
        pytest.raises(ConfigurationError, match=r"reads parameter '0\.bias' by another name"),
    ):
        admit(recipe, [(batch.features, batch.labels)], plain.TRIAL_SEED)


@pytest.mark.parametrize("beside", [False, True])
def test_first_calls_on_copies_count_only_if_something_refers_to_these_afterwards(
    beside: bool,
) -> None:
    model, found, views = nn.Linear(2, 2), list[SecondNames](), list[Tensor]()
    with on_copies(model, found):
        if beside:
            views.append(model.bias.detach())
        else:  # attributes are given back
            model.view = model.bias.detach()
    assert [list(each.keys) for each in found] == [[("parameter", "bias")] if beside else []]
