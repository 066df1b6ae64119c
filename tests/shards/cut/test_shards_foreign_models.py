"""Models as others write them are cut into the shards that were asked for, with the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.shards.cut.choice import UnitProfile
from cerebro_hydra.shards.engine.differences import same_bits
from tests.conformance import text
from tests.shards import zoo
from tests.shards.executors.executor_case import assert_equal_to_plain
from tests.shards.hopping import start
from tests.shards.trials import Make, bound, made, recipe_of, seeded, two_sub_epochs


def _bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = x + bias
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))


bias_gelu = torch.jit.script(_bias_gelu)
"""As Megatron's layers have it."""


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.proj(x))


class SharingBlock(nn.Module):
    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position, self.own = position, nn.Linear(6, 6)

    def forward(self, x):
        return x + self.own(self.position(x)).tanh()


class SharesAChild(nn.Module):
    """Its blocks have one child in common, as those of CoaT."""

    def __init__(self) -> None:
        super().__init__()
        self.position = Position()
        self.blocks = nn.ModuleList(SharingBlock(self.position) for _ in range(4))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def in_blocks(middle: Callable[[torch.Tensor, bool], torch.Tensor]):
    """Return a model whose blocks end with a function of values and of whether they train."""

    class Block(nn.Linear):
        def forward(self, x):
            return middle(super().forward(x), self.training)

    return lambda: nn.Sequential(Block(6, 6), Block(6, 6), nn.Linear(6, 3))


def layered(middle: Callable[[], nn.Module]):
    return lambda: nn.Sequential(
        nn.Linear(6, 6), middle(), nn.Linear(6, 6), middle(), nn.Linear(6, 3)
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_a_scripted_function_computes_operation_by_operation_however_often_it_was_called(
    shards: int,
) -> None:
    for _ in range(3):  # torch joins operations now
        bias_gelu(torch.ones(8, 6, requires_grad=True), torch.ones(6)).sum().backward()
    found = []
    for function in (bias_gelu, _bias_gelu):
        model = in_blocks(lambda x, training: function(x, x.mean(0)))  # noqa: B023
        recipe = seeded(model, shards)
        trial = assert_equal_to_plain(recipe, two_sub_epochs(), cut="modules")
        found.append(trial.tensors())
    scripted, unscripted = found
    assert all(same_bits(scripted[name], tensor) for name, tensor in unscripted.items())


def test_a_scripted_function_of_a_training_step_computes_operation_by_operation() -> None:
    windows = zoo.singly(zoo.vectors(*[8] * 6))
    found = []
    for function in (bias_gelu, _bias_gelu):

        def step(model, batch, optimizers):
            optimizers[0].zero_grad()
            outputs = model(batch["x"])
            loss = function(outputs, outputs.mean(0)).square().mean()  # noqa: B023
            loss.backward()
            optimizers[0].step()
            return loss

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), training_step=step)
        trial = start(recipe.bind(Columns(("x",), ("y",))), windows)
        trial.train(windows)
        found.append(trial.tensors())
    scripted, unscripted = found
    assert all(same_bits(scripted[name], tensor) for name, tensor in unscripted.items())


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6, sparse=True)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, tokens):
        return self.layers(self.embed(tokens).mean(1))


def sparse(optimizer: type[torch.optim.Optimizer], **rules) -> Make:
    return recipe_of(
        Sparse, lambda model: optimizer(model.parameters(), lr=0.1), first_token_loss, shards=3,
        **rules,
    )  # fmt: skip


def first_token_loss(outputs, tokens):
    return F.cross_entropy(outputs, tokens[:, 0] % 3)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled(how: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: how(zoo.Net())


class CompiledBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(zoo.Net(), backend="eager")
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.body(x))


class Logs(zoo.Net):
    """Its hook tells the norm of each gradient, and keeps nothing."""

    def add(self):
        log = logging.getLogger("of a test").debug
        self.b.register_full_backward_hook(lambda module, into, out: log("%s", out[0].norm()))


class SwitchesItsNorm(nn.Module):
    """Runs its norm in training, then in evaluation, and then puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(self.a(x))
        self.norm.eval()
        x = self.norm(x)
        self.norm.train(self.training)
        return self.c(self.b(x.tanh()).tanh())


class Infers(zoo.Net):
    """Its first layers are a frozen backbone, whose outputs are copied."""

    def add(self):
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).requires_grad_(False)

    def forward(self, x):
        with torch.inference_mode():
            x = self.backbone(x)
        return super().forward(x.clone())


class Scales(zoo.Net):
    """Its hook looks for its input where plain training passes it."""

    def add(self):
        self.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))


class RunsOnce(nn.Linear):
    def forward(self, x):
        if torch._C._current_graph_task_id() >= 0:
            raise ConfigurationError("this layer runs once")
        return super().forward(x)


TOKENS = [zoo.singly(zoo.tokens(8, 5)), zoo.singly(zoo.tokens(8, 4, seed=1))]

TRIALS: dict[str, tuple[Make, int]] = {
    "a child that blocks share": (made(SharesAChild, shards=4), 4),
    "blocks that end with rrelu": (
        made(in_blocks(lambda x, train: F.rrelu(x, training=train)), shards=3), 3
    ),
    "blocks that end with rrelu in place": (
        made(in_blocks(lambda x, train: F.rrelu_(x, training=train)), shards=3), 3
    ),
    "layers of rrelu": (made(layered(nn.RReLU), shards=3), 3),
    "blocks that end with alpha dropout": (
        made(in_blocks(lambda x, train: F.alpha_dropout(x, 0.2, train)), shards=3), 3
    ),
    "layers of alpha dropout": (made(layered(lambda: nn.AlphaDropout(0.2)), shards=3), 3),
    "a compiled model": (
        made(compiled(lambda model: torch.compile(model, backend="eager")), shards=3), 3
    ),
    "one that compiles itself": (made(compiled(in_place), shards=3), 3),
    "a compiled part": (made(CompiledBody, shards=3), 3),
    "a hook that logs": (made(Logs, shards=3), 3),
    "a norm that is switched": (made(SwitchesItsNorm, shards=3), 3),
    "a backbone in inference mode": (made(Infers, shards=3), 3),
    "a hook that reads the first argument": (bound(made(Scales, shards=3)), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", TRIALS)
def test_it_is_cut_as_asked_with_the_bits_of_plain_training(name: str) -> None:
    make, shards = TRIALS[name]
    trial = assert_equal_to_plain(make, two_sub_epochs(), "modules")
    assert trial.cut_model.num_shards == shards, trial.admission.report.text()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparse_gradients_are_taken_in_shards(kind, accumulate: int) -> None:
    trial = assert_equal_to_plain(sparse(kind, accumulate=accumulate), TOKENS, "modules")
    assert trial.cut_model.num_shards == 3, trial.admission.report.text()


def test_a_child_that_blocks_share_is_no_place_to_cut() -> None:
    trial = start(made(SharesAChild, shards=9)(), zoo.singly(zoo.vectors(8)))
    assert trial.admission.spec.at == ("blocks.1@0", "blocks.2@0", "blocks.3@0", "last@0")
    with pytest.raises(ConfigurationError, match=r"'position\.proj', where this model can't be"):
        start(made(SharesAChild, shards=["position.proj"])(), zoo.singly(zoo.vectors(8)))


def test_a_compiled_model_is_told_to_run_as_it_was() -> None:
    make = made(compiled(lambda model: torch.compile(model, backend="eager")), shards=3)
    report = start(make(), zoo.singly(zoo.vectors(8))).admission.report.text()
    assert "the model is compiled as a whole and runs as it was before" in report
    layer = made(lambda: nn.Sequential(torch.compile(nn.Linear(6, 3), backend="eager")), shards=1)
    assert "compiled" not in start(layer(), zoo.singly(zoo.vectors(8))).admission.report.text()


def test_a_refusal_of_one_cut_leads_to_fewer_shards() -> None:
    make = made(lambda: nn.Sequential(nn.Linear(6, 6), RunsOnce(6, 6), nn.Linear(6, 3)), shards=3)
    trial = start(make(), zoo.singly(zoo.vectors(8)))
    assert trial.cut_model.num_shards == 1
    (attempt,) = trial.admission.report.attempts
    assert str(attempt) == "by modules into 3 shards: this layer runs once"


def test_the_columns_of_a_model_of_transformers_begin_by_position() -> None:
    recipe = recipe_of(lambda: text.bert(16, 1, 50), loss="model")()
    call = recipe.bind(Columns(("input_ids", "attention_mask"), ("labels",))).call
    tensors = [torch.tensor(n) for n in range(3)]
    args, kwargs = call.arguments(tensors)
    assert args == (tensors[0],)
    assert kwargs == {"attention_mask": tensors[1], "labels": tensors[2]}


class Experts(nn.Module):
    """Runs experts by what the batch is, each between the same two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        x = self.first(x)
        for number in chosen:
            x = self.experts[number](x)
        return self.last(x)


def test_a_layer_that_a_later_forward_runs_first_stands_before_what_it_runs_next() -> None:
    model, profile = Experts(), UnitProfile()
    with profile.measured(model):
        for chosen in ([1], [0, 1], [2], [0, 1, 2]):
            model(torch.zeros(2, 3), chosen)
    numbers = [unit for unit in profile.order if unit.startswith("experts")]
    assert (profile.order[0], profile.order[-1]) == ("first@0", "last@0")
    assert numbers == ["experts.0@0", "experts.1@0", "experts.2@0"]
    assert all(seconds < 60 for seconds in profile.seconds.values())
