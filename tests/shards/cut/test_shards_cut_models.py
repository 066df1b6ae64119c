"""Models that cuts, copies, hooks or names may betray train as in plain PyTorch, cut as asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.shards.cut.spec import CutSpec
from cerebro_hydra.shards.engine.differences import Recorder
from tests.shards import zoo
from tests.shards.executors.executor_case import Cut
from tests.shards.hopping import Trial, owned, start
from tests.shards.trials import (
    TOKENS,
    SubEpoch,
    mlp_recipe,
    recipe_of,
    rotary_recipe,
    seeded,
    two_sub_epochs,
)

# ---------------------------------------------------------------------- values that cross or not


class Inputs(nn.Module):
    """It has two inputs, a mask from one of them, constants of every kind, and a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((6,), 0.5))
        self.register_buffer("shift", torch.arange(6.0), persistent=False)
        self.plain = torch.ones(6) * 0.25

    def forward(self, x, kind):
        mask = (kind > 1).unsqueeze(1).to(x.dtype) * self.shift
        y = x + self.embed(kind)
        for layer in self.layers:
            y = torch.tanh(layer(y)) * self.scale + mask + self.plain
        return {"logits": self.last(y), "mask": mask}


def with_kinds(batch: Batch) -> Batch:
    kinds = torch.arange(batch.rows) % 5
    return replace(batch, features=(*batch.features, kinds))


def dict_loss(outputs, labels):
    return nn.functional.cross_entropy(outputs["logits"], labels) + outputs["mask"].mean()


class WritesIntoAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(3, 3), nn.Linear(6, 3)

    def forward(self, x):
        y = self.a(x)
        z = self.b(y[:, :3] * 1.5)
        y[:, 3:].mul_(2.0)
        return self.c(torch.cat([z, y[:, 3:]], 1))


class Shifts(nn.Module):
    """It makes a value in place from inputs alone, as T5 shifts its labels, and uses it late."""

    def __init__(self, spoil: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 3)
        self.spoil = spoil

    def forward(self, x):
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = x[:, :-1]
        shifted.masked_fill_(shifted > 1, 1.0)
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
            if self.spoil:
                shifted[:, :1] += y[:, :1]
        return self.last(y + shifted)


class Scale(nn.Module):
    """Its gradient is a sum, which torch rounds by the order of what it sums in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(40))

    def forward(self, x):
        return x * self.weight


class Transposes(nn.Module):
    """Hands a value on whose gradient lies in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 40), Scale()
        self.mix, self.last = nn.Linear(32, 32), nn.Linear(40, 3)

    def forward(self, x):
        y = self.scale(self.first(x.unsqueeze(1) * torch.linspace(0, 1, 32)[:, None]))
        return self.last(torch.tanh(self.mix(y.transpose(1, 2))).mean(2))


class Reads(nn.Module):
    """Makes a value without gradient, which several later shards read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        y = self.layers[0](x)
        positive = (y > 0).to(x.dtype)
        for layer in self.layers[1:]:
            y = layer(y * positive)
        return self.last(y)


class Regions(nn.Module):
    """Has units in regions without gradients and of a precision, and one in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            scale = self.drop(self.frozen(x)).abs()
            if self.training:
                self.calls += 1
        y = self.layers[0](x * self.calls)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layers[1](y)
            with torch.autocast("cpu", enabled=False):
                y = self.drop(self.layers[2](y.float()))
            y = self.layers[3](y)
            y = y + nn.functional.linear(y, self.layers[3].weight)
        y = y.float() * scale
        with torch.no_grad():
            y.mul_(1.5)  # writes into a value that has a gradient
        return self.last(y)


# ---------------------------------------------------------------------- buffers and constants


class Remembers(zoo.Pair):
    """Writes what it makes of a buffer into the buffer."""

    def add(self):
        self.register_buffer("seen", torch.zeros(6, dtype=torch.bool))

    def forward(self, x):
        if self.training:
            self.seen.copy_(self.seen | (x > 1).any(0))
        return self.b(self.a(x * self.seen))


class SharedNorm(zoo.Net):
    def add(self):
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.c(self.norm(self.b(self.norm(self.a(x)))))


class CountsAlways(zoo.Pair):
    """It counts in evaluation too."""

    def add(self):
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.b(self.a(x) * self.calls)


class Centers(zoo.Pair):
    """Keeps the mean of its batch in a buffer, in evaluation too."""

    def add(self):
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.copy_(x.mean(0))
        return self.b(self.a(x - self.mean))


class MaskedLinear(nn.Linear):
    """Keeps part of its weight at 0 in training, by writing there."""

    def __init__(self, how: str) -> None:
        super().__init__(6, 6)
        self.register_buffer("mask", (torch.arange(36) % 2).view(6, 6).float())
        self.how = how

    def forward(self, x):
        if self.training and self.how == "in place":
            self.weight.data *= self.mask
        elif self.training:
            self.weight.data = self.weight.data * self.mask
        return super().forward(x)


def masked(how: str) -> nn.Module:
    return nn.Sequential(MaskedLinear(how), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))


class Checks(zoo.Pair):
    """Asks for values of constants: of a mask, of an attribute, and of what a prior is made of."""

    def add(self):
        self.weights = torch.linspace(0, 1, 6)

    def forward(self, x):
        mask = torch.ones(6, 6).tril()
        mask[0, 1] += 1
        y = self.a(x)
        if not mask.bool().all() and self.weights.sum() > 2:
            y = y @ mask
        y = y * nn.functional.dropout(torch.ones(6), 0.5, self.training)
        prior = torch.distributions.Normal(torch.zeros(6), torch.ones(6))
        return self.b(y + prior.variance * self.weights.tolist()[1])


class Branches(zoo.Net):
    """It is another function while it is traced."""

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x)))
        return self.c(torch.sigmoid(y) if type(y) is torch.Tensor else y)


class AssumesRows(zoo.Pair):
    """Takes another number of rows for the one that it was traced with, unnoticed by torch."""

    def forward(self, x):
        rows = x.shape[0]
        return self.b(self.a(x) * (8 if isinstance(rows, torch.SymInt) else rows))


# ---------------------------------------------------------------------- units, names and hooks


class TwoPrecisions(zoo.Net):
    def add(self):
        self.b.double()

    def forward(self, *inputs):
        return self.c(self.b(torch.tanh(self.a(inputs[0])).double()).float())


class Attention(nn.Module):
    """Its evaluation has fused kernels that no exported graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 16), nn.Linear(16, 3)
        self.b = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        y = self.a(x.unsqueeze(1) * torch.arange(1.0, 6.0)[:, None])
        return self.c(self.b(y, y, y)[0].mean(1))


class EvaluatesOtherwise(zoo.Pair):
    """In evaluation it is another function while it is traced."""

    def forward(self, x):
        y = self.a(x)
        if not self.training and type(y) is not torch.Tensor:
            y = y * (1 + 2**-20)
        return self.b(y)


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = zoo.Decides(), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.body(x))


def deciding(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(zoo.Decides(), *middle, nn.Dropout(0.2), nn.Linear(6, 3))


class Named(nn.Module):
    """Layers with several names, of which the first may lie inside of a unit or outside."""

    def __init__(self, outside_first: bool) -> None:
        super().__init__()
        body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6))
        if outside_first:
            self.alias = body[1]
        self.body = body
        self.again = body
        if not outside_first:
            self.alias = body[1]
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.alias(self.again(torch.tanh(self.body[0](x)))))


class Shares(nn.Module):
    """Its embedding is also another module's, as in prompt tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"embed": nn.Embedding(50, 6), "body": nn.Linear(6, 6)})
        self.prompt = nn.Parameter(torch.randn(2, 6))
        self.embed = self.base["embed"]
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        tokens = self.embed((x.abs() * 9).long().clamp(max=49))
        prompts = torch.cat([tokens, self.prompt.expand(len(x), 2, 6)], 1)
        return self.last(self.base["body"](prompts).mean(1))


class KeepsActivations(nn.Module):
    """It computes on what hooks stored, and with a function that uses its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(12, 3)
        self.found: dict[str, torch.Tensor] = {}
        self.scaled = lambda x, by=self.last: x * by.weight.sum()
        for name in ("0", "3"):
            self.body.get_submodule(name).register_forward_hook(self._keeping(name))

    def _keeping(self, name):
        def hook(module, args, output):
            self.found[name] = output

        return hook

    def forward(self, x):
        self.body(x)
        return self.last(self.scaled(torch.cat([self.found["0"], self.found["3"]], 1)))


def normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        first, last = (nn.utils.weight_norm(nn.Linear(6, n)) for n in (6, 3))
    return nn.Sequential(first, nn.Dropout(0.2), last)


def pruned() -> nn.Module:
    model = zoo.mlp()
    for layer in (model[0], model[8]):
        prune.l1_unstructured(layer, "weight", amount=0.4)
    return model


class Mapped(nn.Module):
    """Runs layers row by row, and two of them as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 3)
        self.several = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        x = torch.vmap(lambda row: self.drop(self.first(row)), randomness="different")(x)
        stacked = torch.func.stack_module_state(list(self.several))
        both = torch.vmap(
            lambda params, buffers: torch.func.functional_call(
                self.several[0], (params, buffers), (x,)
            )
        )(*stacked)
        return torch.vmap(self.last)(both.mean(0))


class ArgumentTorch(zoo.Pair):
    def forward(self, torch):
        return self.b(self.a(torch))


class CallsByName(nn.Module):
    """Calls the forward of its layers, so that no hook of them runs, as SqueezeBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList([nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer.forward(x)
        return self.last(x)


class Doubled(nn.Linear):
    """A layer that is the whole model, with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


class Checkpointed(nn.Module):
    """Drops activations of its blocks and computes them again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)) for _ in range(3)
        )
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def regression() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()


# ---------------------------------------------------------------------- the table


def of_batches(change: Callable[[Batch], Batch]) -> Callable[[], list[SubEpoch]]:
    return lambda: [[[change(b) for b in window] for window in each] for each in two_sub_epochs()]


def one_crosses(trial: Trial) -> bool:
    """Only the activation crosses a cut: what is made of inputs alone is made again."""
    return all(len(graph.live_in) == 1 for graph in trial.cut_model.graphs.train[1:])


def by_modules(model: Callable[[], nn.Module], shards: Any = 2, **rules: Any) -> Cut:
    return Cut(mlp_recipe(model=model, shards=shards, **rules), "modules", 2)


def no_graph(model: Callable[[], nn.Module], at: int, says: str) -> Cut:
    return Cut(seeded(model, 3), "modules", at, "export", says)


MODELS: dict[str, Cut] = {
    "names": Cut(
        mlp_recipe(shards=["3", "6"]), at=("3@0", "6@0"),
        check=lambda trial: trial.admission.spec
        == CutSpec("export", ("3@0", "6@0"), overwritten=("4@0",))
        and [owned(trial, k) for k in range(3)] == [
            ("0.weight", "0.bias"), ("3.weight", "3.bias"),
            ("6.weight", "6.bias", "8.weight", "8.bias"),
        ],
    ),
    "a container, which stands for its first unit": Cut(
        seeded(
            lambda: nn.Sequential(
                nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
                nn.Sequential(nn.Linear(6, 3), nn.Dropout()),
            ),
            ["1"],
        ),
        at=("1.0@0",),
    ),
    "values of inputs alone": Cut(
        recipe_of(Inputs, loss=dict_loss, shards=4), sub_epochs=of_batches(with_kinds),
        check=lambda trial: one_crosses(trial)
        and {b.name for b in trial.cut_model.buffers} == {"scale"},
    ),
    "such a value that is written in place": Cut(
        seeded(lambda: Shifts(False), 4), at=4, check=one_crosses
    ),
    "one into which training writes": Cut(
        seeded(lambda: Shifts(True), 4), check=lambda trial: trial.cut_model.num_shards <= 2
    ),
    "a write into a view": Cut(seeded(WritesIntoAView, 9), at=("c@0",)),
    "a gradient of other strides": Cut(seeded(Transposes, ["scale", "mix"])),
    "a value without gradient": Cut(
        seeded(Reads, 6),
        check=lambda trial: sum(len(g.live_in) == 2 for g in trial.cut_model.graphs.train) > 1,
    ),
    "regions": Cut(
        seeded(Regions, ["layers.0", "layers.1", "layers.3"]), at=4,
        check=lambda trial: owned(trial, 0) == ("frozen.weight", "frozen.bias")
        and owned(trial, 2) == tuple(f"layers.{n}.{p}" for n in (1, 2) for p in ("weight", "bias")),
    ),
    "a buffer that is overwritten": Cut(
        seeded(Remembers), check=lambda trial: trial.tensors()["buffer:seen"].any()
    ),
    "a passing buffer that counts": Cut(
        seeded(zoo.Counts),
        check=lambda trial: "buffer:calls"
        in {e.name for s in trial.layout.shards for e in s.trainable.entries},
    ),
    "two writers of one buffer": Cut(seeded(SharedNorm, 9), at=("norm@0", "c@0")),
    "a buffer that every forward sets anew": Cut(seeded(Centers), at=2),
    "constants that are asked for": Cut(
        seeded(Checks), check=lambda trial: trial.admission.report.fallback is None
    ),
    "a wrong number of rows": Cut(
        seeded(AssumesRows), "modules", None, "export", "training differs from the uncut model"
    ),
    "another evaluation": Cut(
        seeded(EvaluatesOtherwise), "modules", 2, "export", "output 0 of the model in evaluation"
    ),
    "attention": Cut(seeded(Attention), at=2),
    "another function while it is traced": Cut(
        seeded(Branches, 3), "modules", 3, "export",
        r"the first operation whose output differs is aten.sigmoid.default in 'b'"
        r"[\s\S]*whose output is float32\[8, 6\], in step 0",
    ),
    "two precisions that are clipped": Cut(seeded(TwoPrecisions, 3, clip_grad_norm=0.1), at=3),
    "a sequence that can't be exported": no_graph(
        lambda: deciding(zoo.Decides()), 3, "torch.export failed"
    ),
    "another model": no_graph(Wraps, 2, "torch.export failed"),
    "one of norms": Cut(
        seeded(lambda: deciding(nn.BatchNorm1d(6)), ["1", "3"], metrics=["accuracy"]), "modules", 3
    ),
    "one in one shard": Cut(
        seeded(lambda: deciding(nn.BatchNorm1d(6)), 1, metrics=["accuracy"]), "modules", 1
    ),
    "checkpoints around dropout": Cut(seeded(Checkpointed, 3), "modules", 3),
    "an inner name first": by_modules(lambda: Named(outside_first=False)),
    "an outer name first": replace(by_modules(lambda: Named(outside_first=True)), cut="export"),
    "a shared embedding": by_modules(Shares),
    "activations by hooks": by_modules(KeepsActivations, ema=0.9, metrics=["accuracy"]),
    "weight_norm": replace(by_modules(normed), cut="export"),
    "an average of it": by_modules(normed, ema=0.9, metrics=["accuracy"]),
    "pruned": by_modules(pruned),
    # The stacked weights of `several` are read before their own module runs.
    "vmap": by_modules(Mapped, ["last"]),
    "a graph of vmap": replace(
        by_modules(Mapped, 2), at=None, asked="export", says="by export: a step failed: "
    ),
    "an argument called torch": replace(
        by_modules(ArgumentTorch), asked="export", says="by export: a step failed: "
    ),
    "a mask in training": by_modules(lambda: masked("in place")),
    "a mask that is assigned": by_modules(lambda: masked("anew")),
    "DataParallel": by_modules(lambda: nn.DataParallel(zoo.mlp())),
    "double precision": replace(by_modules(lambda: zoo.mlp().double()), cut="export"),
    "regression in double precision": Cut(
        recipe_of(regression, loss=nn.BCEWithLogitsLoss(), metrics=["mse", "accuracy"], shards=2),
        sub_epochs=of_batches(lambda b: replace(b, labels=((b.labels[0] > 0).float(),))),
        check=lambda trial: {t.dtype for t in trial.tensors().values() if t.is_floating_point()}
        >= {torch.float64},
    ),
    "layers that are called by name": Cut(seeded(CallsByName), "modules", 2),
    # Its rotary embeddings lie in regions without gradients.
    "Llama": Cut(rotary_recipe("Llama"), at=3, sub_epochs=lambda: TOKENS),
    "one layer": Cut(mlp_recipe(model=lambda: nn.Linear(6, 3), shards=1), "modules", 1),
    "one of its own": Cut(mlp_recipe(model=lambda: Doubled(6, 3), shards=1), "modules", 1),
}  # fmt: skip


MARKS = dict.fromkeys(["attention", "another evaluation"], pytest.mark.kernels)


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in MODELS])
def test_it_trains_and_evaluates_as_plain_pytorch(name: str) -> None:
    MODELS[name].prove()


@pytest.mark.kernels
def test_evaluation_has_the_operations_of_the_uncut_model() -> None:
    """torch multiplies otherwise by a weight that requires no gradient, also where none is kept."""
    batches = zoo.vectors(8)
    trial = start(seeded(Attention, cut="export")(), [batches])
    assert trial.admission.spec.mode == "export"
    with Recorder() as cut:
        trial.evaluate(batches)
    with Recorder() as plain, torch.no_grad(), seeded(Attention)().precision():
        Attention().eval()(*batches[0].features)
    products = ("addmm", "bmm", "mm")
    of_cut, of_plain = (
        [op.name for op, _ in each.operations if op.name.split(".")[1] in products]
        for each in (cut, plain)
    )
    assert of_cut == of_plain


def test_the_batches_of_a_partition_see_what_was_written_before() -> None:
    recipe = seeded(CountsAlways)()
    (x,), scratch = zoo.vectors(4)[0].features, dict[str, torch.Tensor]()
    for calls in (1.0, 2.0):
        found = recipe.call.evaluate(recipe.model, (x,), scratch)
        assert torch.allclose(found, recipe.model.b(recipe.model.a(x) * calls))
    assert recipe.model.calls.item() == 0
