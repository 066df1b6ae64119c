"""What admission says of a model that fails: the true cause, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from tests.shards import zoo
from tests.shards.cut.test_shards_foreign_models import Sparse
from tests.shards.hopping import start
from tests.shards.trials import Make, bound, made, mlp_recipe, recipe_of

VECTORS = zoo.singly(zoo.vectors(8, 5))
TOKENS = zoo.singly(zoo.tokens(8, 5))
CORRECT = "; correct it, and try it on such a batch alone"


class Infers(zoo.Net):
    def forward(self, x):
        with torch.inference_mode():
            x = self.a(x)
        return self.c(self.b(x).tanh())


def hooked(register: str, hook) -> Make:
    class Hooked(zoo.Net):
        def add(self):
            getattr(self.b, register)(hook)

    return bound(made(Hooked))


def overwritten() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    model[0].register_full_backward_hook(lambda module, into, out: None)
    model[1].register_full_backward_hook(lambda module, into, out: None)
    return model


class Wraps(torch.optim.Optimizer):
    """Steps by another optimizer, of which it may hold several."""

    def __init__(self, inner: torch.optim.Optimizer, several: bool = False) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.1})
        self.inner = [inner] if several else inner

    def step(self, closure=None):
        return self.inner.step(closure)


def wrapped(**options) -> Make:
    return mlp_recipe(lambda m: Wraps(torch.optim.Adam(m.parameters(), lr=0.1), **options))


def hook_of(register: str) -> Make:
    def model() -> nn.Module:
        built = zoo.mlp()
        getattr(built[0].weight, register)(lambda given: None)
        return built

    return mlp_recipe(model=model)


def keeping(register: str):
    def model() -> nn.Module:
        kept, built = [], zoo.Net()
        getattr(built.b, register)(lambda *given: kept.append(len(given)))
        return built

    return made(model)


def sparse_with(optimizer, **rules) -> Make:
    return recipe_of(
        Sparse, optimizer, lambda out, tokens: nn.functional.cross_entropy(out, tokens[:, 0] % 3),
        shards=3, **rules,
    )  # fmt: skip


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Noisy(zoo.Net):
    def add(self):
        self.noise = torch.Generator()

    def forward(self, x):
        return super().forward(x + torch.rand(x.shape, generator=self.noise))


class BeginsOnce(zoo.Net):
    """Makes a buffer of the first batch."""

    def add(self):
        self.register_buffer("shift", torch.zeros(6))
        self.begun = False

    def forward(self, x):
        if self.training and not self.begun:
            self.shift, self.begun = x.mean(0), True
        return super().forward(x - self.shift)


class Merges(nn.Linear):
    """Adds a frozen weight and what trains together in evaluation, as LoRA layers do."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.weight.requires_grad_(False)
        self.down, self.up = (nn.Parameter(torch.ones(*s)) for s in ((6, 1), (1, 6)))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.down @ self.up
            self.merged = not mode
        return self

    def forward(self, x):
        return (
            super().forward(x) if self.merged else super().forward(x) + x @ self.up.T @ self.down.T
        )


class Prepares(nn.Linear):
    """Computes once for an evaluation what its forwards use there."""

    def train(self, mode=True):
        self.doubled = None if mode else 2 * self.weight.detach()
        return super().train(mode)

    def forward(self, x):
        return x @ (2 * self.weight if self.training else self.doubled)


class MakesHead(zoo.Net):
    def add(self):
        self.head = None

    def forward(self, x):
        if self.head is None:
            self.head = nn.Linear(3, 3)
        return self.head(super().forward(x))


class MakesAnew(zoo.Net):
    def forward(self, x):
        return nn.Linear(3, 3)(super().forward(x))


class Teaches(nn.Module):
    """Compares with a frozen teacher, which is in training mode."""

    def __init__(self, model=None):
        super().__init__()
        self.teacher = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).requires_grad_(False)

    def forward(self, outputs, labels):
        return nn.functional.mse_loss(outputs, self.teacher(outputs.detach()))


class Scales(nn.Module):
    """A loss with a parameter that its user wants to train."""

    def __init__(self, model=None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, outputs, labels):
        return nn.functional.cross_entropy(outputs * self.scale, labels)


def penalised(**rules) -> Recipe:
    model = zoo.Net()

    def loss(outputs, labels):
        size = sum(p.square().sum() for p in model.parameters())
        return nn.functional.cross_entropy(outputs, labels) + 0.01 * size

    return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **rules)


class Embeds(zoo.Net):
    def add(self):
        self.table = nn.Embedding(9, 6, max_norm=2.0)


def trained_with_loss(**rules) -> Recipe:
    model, loss = zoo.Net(), Scales()
    parameters = [*model.parameters(), *loss.parameters()]
    return Recipe(model, torch.optim.SGD(parameters, lr=0.1), loss, **rules)


class ListsMomentum(torch.optim.Optimizer):
    """Keeps the momentum of each parameter in a list, as many do that are written by hand."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.momentum = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        for parameter, momentum in zip(parameters, self.momentum, strict=False):
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(momentum, alpha=0.1)


class MapsMomentum(ListsMomentum):
    """Keeps it by parameter."""

    def __init__(self, params):
        super().__init__(params)
        self.momentum = {}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            momentum = self.momentum.setdefault(parameter, torch.zeros_like(parameter))
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(momentum, alpha=0.1)


class Averages(torch.optim.SGD):
    """Has other weights for evaluation, as schedule-free optimizers do."""

    def train(self): ...

    def eval(self): ...


class Closes(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class Finds(torch.optim.SGD):
    """Knows each parameter by its id."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.known = {id(p): p.numel() for p in self.param_groups[0]["params"]}

    def step(self, closure=None):
        assert all(self.known[id(p)] for p in self.param_groups[0]["params"])
        return super().step(closure)


def sgd_of(kind: type[torch.optim.SGD]) -> Callable[..., Make]:
    return lambda **rules: recipe_of(zoo.Net, lambda m: kind(m.parameters(), lr=0.1), **rules)


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))


MISLED: dict[str, tuple[Callable[..., Make], str]] = {
    "layers that merge when they are switched": (
        lambda **rules: made(lambda: nn.Sequential(Merges(6, 6), nn.Linear(6, 3)), **rules),
        r"train\(\) and eval\(\) of module '0' write to its parameter '0\.weight', as LoRA layers "
        ".*; leave the weights apart, as with merge_weights=False, and merge them after training$",
    ),
    "a module that prepares for evaluations when it is switched": (
        lambda **rules: made(lambda: nn.Sequential(Prepares(6, 6), nn.Linear(6, 3)), **rules),
        r"train\(\) or eval\(\) of module '0' \(Prepares\) sets what evaluations compute with, and "
        "weights come only later; compute in forward what depends on weights$",
    ),
    "an embedding that writes to its weight": (
        lambda **rules: made(Embeds, **rules),
        r"module 'table' is an Embedding with max_norm=2\.0, whose forward writes to its "
        "weight, in evaluation too, .*; leave max_norm out, and scale what the embedding gives$",
    ),
    "a module that the first forward makes": (
        lambda **rules: made(MakesHead, **rules),
        r"the forward makes parameter 'head\.weight' in its first call, .*; make its module in "
        "__init__, or run the model once on a batch before the optimizer is made$",
    ),
    "a module that each forward makes": (
        lambda **rules: made(MakesAnew, **rules),
        "output 0 of the model in evaluation depends on random numbers, which have no key there; "
        r"draw them `if self\.training` only, and make layers in __init__, not in a forward$",
    ),
    "a teacher in training mode": (
        lambda **rules: made(zoo.Net, Teaches, **rules),
        r"buffer 'teacher\.0\.num_batches_tracked' of the loss, .*; its norm is in training mode: "
        r"call eval\(\) of a frozen teacher in the factory, or make it a module of the model$",
    ),
    "an optimizer with parameters of the loss": (
        lambda **rules: lambda: trained_with_loss(**rules),
        "param group 0 of the optimizer holds parameter 'scale' of the loss Scales, and only the "
        r"model's hop; make the loss a module of the model, .*loss='model'$",
    ),
    "an optimizer with weights for evaluation": (
        sgd_of(Averages),
        r"optimizer Averages has other weights for evaluation, which its train\(\) and eval\(\) "
        r"put in place, and nothing calls these here; choose another one, and average by ema",
    ),
    "a step that needs a closure": (
        sgd_of(Closes),
        "the step of optimizer Closes needs an argument, 'closure', and is called without one, "
        "since a loss is computed once in a step; choose an optimizer that needs none$",
    ),
    "an optimizer that knows its parameters by id": (
        sgd_of(Finds),
        r"optimizer Finds can't step on a copy of parameter 'a\.weight' alone \(KeyError: \d+\), "
        r"as it does in shards; let it keep what it has of a parameter in its state, as",
    ),
    **{
        f"an optimizer that {kind.__name__} of {model.__name__}": (
            lambda kind=kind, model=model, **rules: recipe_of(
                model, lambda m: kind(m.parameters()), **rules
            ),
            rf"optimizer {kind.__name__} keeps tensors that its steps change in its attribute "
            r"'momentum', which hop with no shard; keep them in its state, as self\.state\[p\]",
        )
        for kind in (ListsMomentum, MapsMomentum)
        for model in (zoo.Net, deep)
    },
}  # fmt: skip

CUTS: dict[str, dict[str, Any]] = {
    "one shard": {"shards": 1},
    "shards": {"shards": 3},
    "a graph": {"shards": 3, "cut": "export"},
    "a pipeline": {"shards": 3, "schedule": "gpipe"},
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("what", MISLED)
def test_a_cause_has_one_sentence_however_the_model_is_cut(what: str, cut: str) -> None:
    make, message = MISLED[what]
    with pytest.raises(ConfigurationError, match=f"(?m){message}"):
        start(bound(make(**CUTS[cut]))(), VECTORS)


TOLD: dict[str, tuple[Make, str]] = {
    "a penalty on weights of which an average is evaluated": (
        lambda: penalised(ema=0.8, shards=2),
        r"loss in evaluation differs with ema=0\.8: what a loss, .*, such as model\.parameters.*, "
        "is not the average, .*; take a penalty on weights by weight_decay",
    ),
    "inference mode": (
        made(Infers),
        r"the forward failed .*; take torch\.no_grad\(\) in place of torch\.inference_mode\(\), or",
    ),
    "a forward pre-hook": (
        hooked("register_forward_pre_hook", lambda module, args: args[3]),
        r"a forward pre-hook of module 'b' failed on .* IndexError: tuple index .*" + CORRECT,
    ),
    "a forward hook": (
        hooked("register_forward_hook", lambda module, args, out: out.nothing),
        r"a forward hook of module 'b' failed on a batch .* AttributeError.*" + CORRECT,
    ),
    "a backward hook": (
        hooked("register_full_backward_hook", lambda module, into, out: out[7]),
        r"a backward hook of module 'b' failed on a batch .* IndexError.*" + CORRECT,
    ),
    "a value that is overwritten": (
        made(overwritten), r"the forward failed on .*is being modified inplace.*" + CORRECT
    ),
    "an optimizer that wraps another": (
        wrapped(), "optimizer Wraps wraps another one, Adam, in its attribute 'inner', whose state"
    ),
    "one that wraps several": (wrapped(several=True), "give Adam itself, or derive Wraps from it"),
    "a hook on a gradient": (hook_of("register_hook"), r"hook \(Tensor\.register_hook\)"),
    "a hook after a gradient": (
        hook_of("register_post_accumulate_grad_hook"),
        r"gradient hook \(Tensor\.register_post_accumulate_grad_hook\)",
    ),
    "what a backward hook keeps": (
        keeping("register_full_backward_hook"),
        "changes what is kept by a backward hook of module 'b'.*; register it as a buffer",
    ),
    "what a forward hook keeps": (
        keeping("register_forward_hook"), "changes what is kept by a forward hook of module 'b'"
    ),
    "a generator": (
        made(Noisy), r"attribute 'noise' of the model .*; draw from torch without a generator"
    ),
    "a flag that begins something once": (
        made(BeginsOnce), r"such as attribute 'begun' of the model .*, which the first steps change"
    ),
    "a sparse momentum": (
        sparse_with(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
        r"SGD keeps 'momentum_buffer' of parameter 'embed\.weight' as a sparse .*sparse=False",
    ),
    "a sparse gradient that is clipped": (
        sparse_with(plain_sgd, clip_grad_norm=1.0),
        "clipping failed on .*; set sparse=False in the embedding, or leave clipping out",
    ),
    "a sparse gradient of replicas": (
        sparse_with(plain_sgd, replicas=2),
        r"gradient of parameter 'embed\.weight' is sparse, and replicas .*, or leave replicas out",
    ),
    "a sparse gradient of a tail": (
        sparse_with(plain_sgd, replicas="tail"),
        r"gradient of parameter 'embed\.weight' is sparse, and replicas .*, or leave replicas out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TOLD)
def test_the_cause_is_told_with_the_remedy(what: str) -> None:
    make, message = TOLD[what]
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        start(make(), TOKENS if "sparse" in what else VECTORS)


def pseudo_labels(whole: bool, when: Callable[[bool], bool]) -> Recipe:
    """Return a recipe whose collate scales rows by what the model, or a layer, makes of them."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))

    def collate(batch: dict[str, Any], training: bool) -> dict[str, Any]:
        name, *_ = batch
        if not when(training):
            return batch
        with torch.no_grad():
            made = (model if whole else model[2])(batch[name])
        return {**batch, name: batch[name] * made.softmax(1).max(1).values[:, None]}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=3, collate=collate)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "when", [lambda training: training, lambda training: True], ids=["training", "always"]
)
def test_a_collate_that_calls_the_model_is_told_what_it_can_not_have(
    whole: bool, when: Callable[[bool], bool]
) -> None:
    with pytest.raises(ConfigurationError, match="collate calls the model, whose shards may be"):
        start(bound(lambda: pseudo_labels(whole, when))(), VECTORS)


def test_a_collate_may_call_a_model_of_its_own() -> None:
    teacher = nn.Linear(6, 6)

    def recipe() -> Recipe:
        built = pseudo_labels(True, lambda training: False)

        def collate(batch: dict[str, Any], training: bool) -> dict[str, Any]:
            name, *_ = batch
            return {**batch, name: teacher(batch[name]).detach()}

        return Recipe(built.model, built.optimizer, built.loss, shards=3, collate=collate)

    start(bound(recipe)(), VECTORS).train(VECTORS)
