"""A training step that steps several optimizers trains as its plain loop does, through a hop."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra import SparkEstimator
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe
from tests.recipe import gans
from tests.shards import hopping, plain

COLUMNS = Columns(("features",), ("label",))
GENERATOR = torch.Generator().manual_seed(1)
ROWS = torch.randn(104, 16, generator=GENERATOR)
BATCHES = [
    Batch((ROWS[i : i + 16],), (torch.zeros(len(ROWS[i : i + 16])),), len(ROWS[i : i + 16]))
    for i in range(0, 104, 16)
]
PARTITIONS = [[[batch] for batch in BATCHES[:4]], [[batch] for batch in BATCHES[4:]]]


def by_hand() -> tuple[list[float], gans.GAN, list[torch.optim.Optimizer]]:
    """Train a GAN in a plain loop of PyTorch."""
    torch.manual_seed(5)
    model = gans.GAN()
    optimizers = gans.optimizers_of(model)
    scheduler = gans.halved(optimizers[0])
    optimizers[0]._opt_called = True  # it steps in every other step, of which torch would warn
    losses = []
    for step, batch in enumerate(BATCHES):
        torch.manual_seed(seed_of(plain.TRIAL_SEED, step, 0, ""))
        losses.append(gans.train_gan(model, batch.features, optimizers)["loss"].item())
        scheduler.step()
    return losses, model, optimizers


def built(make: Any, *args: Any, **options: Any) -> Recipe:
    torch.manual_seed(5)
    return make(*args, **options).bind(COLUMNS)  # type: ignore[no-any-return]


@pytest.mark.parametrize("module", [False, True])
def test_a_gan_hops_between_two_partitions_with_the_bits_of_a_plain_loop(module: bool) -> None:
    losses, model, optimizers = by_hand()
    trial = hopping.start(built(gans.either, {"module": module}), [[b] for b in BATCHES])
    for windows in PARTITIONS:  # bytes and JSON alone go on from one to the other
        trial.train(windows)
    assert trial.losses == losses
    found, buffers = trial.tensors(), dict(model.named_buffers())
    for name, tensor in model.state_dict().items():
        kind = "buffer" if name in buffers else "param"
        assert torch.equal(found[f"{kind}:{name}"], tensor), name
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, tensor in state.items():
                assert torch.equal(found[f"optim:{names[parameter]}:{key}"], tensor), key
    groups = trial.cursor(0)["groups"]
    assert [group["lr"] for group in groups] == [o.param_groups[0]["lr"] for o in optimizers]


def test_its_validation_rows_are_measured_by_loss_and_metrics_of_forward() -> None:
    metrics = {"score": (lambda scores, label: scores.mean(), "max")}
    trial = hopping.start(built(gans.gan, {}, metrics=metrics, ema=0.5), [[b] for b in BATCHES])
    trainer = PlainTrainer(built(gans.gan, {}, metrics=metrics, ema=0.5), plain.TRIAL_SEED, 4)
    for windows in PARTITIONS:
        trial.train(windows)
        trainer.train(windows)
    assert trial.evaluate(BATCHES) == trainer.evaluate(BATCHES)
    assert trainer.evaluate(BATCHES).sums.keys() == {"loss", "score"}
    assert all(torch.equal(trial.tensors()[n], t) for n, t in trainer.tensors().items())


def test_an_audit_and_a_fork_go_on_from_its_state() -> None:
    trial = hopping.start(built(gans.gan, {}), [[b] for b in BATCHES])
    trial.train(PARTITIONS[0])
    other = hopping.start(built(gans.gan, {}), [[b] for b in BATCHES])
    other.shards, other.step = list(trial.shards), trial.step
    hopping.train_uncut(other, PARTITIONS[1], built(gans.gan, {}))
    trial.train(PARTITIONS[1])
    assert other.shards == trial.shards
    # A fork begins with the options of its own recipe, and where its LR schedule is by then.
    frozen = json.loads(trial.shards[0][1])
    fork = hopping.start(built(gans.gan, {"lr": 0.5}), [[b] for b in BATCHES])
    fork.shards = [(trial.shards[0][0], json.dumps({"step": frozen["step"], "epochs": 1}))]
    fork.step = trial.step
    fork.train(PARTITIONS[0][:1])
    first, second = (group["lr"] for group in fork.cursor(0)["groups"])
    assert (first, second) == (0.5 * 0.5 ** (8 // 3), 5.0)


def test_an_estimator_copies_model_optimizers_and_what_the_step_refers_to() -> None:
    model = gans.GAN()
    optimizers = gans.optimizers_of(model)

    def step(given: nn.Module, batch: Any, optimizers: Any) -> Tensor:
        assert given is model, "the step refers to the copy, as it would to the model"
        return gans.train_gan(given, batch, optimizers)["loss"]

    estimator = SparkEstimator(model, optimizers, gans.realness, training_step=step, batch_size=16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = estimator._factory({"batch_size": 8}).bind(COLUMNS)
    assert copied.model is not model and copied.batch_size == 8
    PlainTrainer(copied, 1, 4).train([[batch] for batch in BATCHES[:2]])
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert any(not torch.equal(before[name], t) for name, t in copied.model.state_dict().items())
    assert [type(each).__name__ for each in copied.optimizer.members] == ["Adam", "SGD"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shards": ({"shards": 2}, "shards is 2: it runs as a whole, in one shard"),
    "blocks": ({"shards": ["critic"]}, r"shards is \['critic'\]: it runs as a whole"),
    "schedule": ({"schedule": "gpipe", "shards": "auto"}, "schedule is 'gpipe': a schedule is for"),
    "accumulate": ({"accumulate": 2}, "accumulate is 2: it is given one batch"),
    "norm": ({"clip_grad_norm": 1.0}, r"clip_grad_norm is 1.0: call torch.nn.utils.clip_grad_norm"),
    "value": ({"clip_grad_value": 1.0}, "clip_grad_value is 1.0: call torch.nn.utils.clip_grad_va"),
    "autocast": ({"autocast": "float16"}, "autocast is 'float16': write `with torch.autocast"),
    "replicas": ({"replicas": 2}, "replicas is 2: gradients of replicas are summed before a step"),
    "recompute": ({"recompute": True}, "recompute is True: call torch.utils.checkpoint"),
    "place": ({"optimizer_on": "host"}, "optimizer_on is 'host': the step itself calls its"),
    "no function": ({"training_step": 1}, "training_step is 1; give a function"),
    "no step": ({"training_step": None}, "optimizer is a list of 2, and nothing says when"),
    "none": ({"optimizer": []}, "optimizer is an empty list"),
    "schedules": ({"lr_scheduler": [gans.halved]}, "has 1 functions for 2 optimizers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_has_no_use_for_is_refused_in_a_sentence(case: str) -> None:
    options, told = REFUSED[case]
    with pytest.raises(ConfigurationError, match=told):
        PlainTrainer(built(gans.gan, {}, **options), 1, 4)


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    model = gans.GAN()
    both = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.Adam(model.critic.parameters()),
    ]
    with pytest.raises(ConfigurationError, match=r"'critic.0.weight' is in two optimizers"):
        Recipe(model, both, gans.realness, training_step=gans.train_gan)


def forgets(model: Any, batch: Any, optimizers: Any) -> Tensor:
    return gans.realness(model(batch[0]), batch[1])


def adds(model: Any, batch: Any, optimizers: Any) -> Tensor:
    loss = gans.realness(model(batch[0]), batch[1])
    loss.backward()
    optimizers[1].step()
    return loss


def gathers(number: int, since: int = 0) -> Any:
    """Return a step that moves the critic once in so many batches, by the gradients of all."""

    def step(model: Any, batch: Any, optimizers: Any) -> Tensor:
        loss = gans.realness(model(batch[0]), batch[1])
        loss.backward()
        model.steps += 1
        if model.steps < since or model.steps % number == 0:
            optimizers[1].step()
            optimizers[1].zero_grad()
        return loss

    return step


def freezes(model: Any, batch: Any, optimizers: Any) -> Tensor:
    loss = gans.train_gan(model, batch, optimizers)["loss"]
    model.critic[0].requires_grad_(False)
    return loss


def gives_rows(model: Any, batch: Any, optimizers: Any) -> Tensor:
    gans.train_gan(model, batch, optimizers)
    return model(batch[0])  # type: ignore[no-any-return]


def fails(model: Any, batch: Any, optimizers: Any) -> Tensor:
    return model.critic(batch["label"][:3])  # type: ignore[no-any-return]


class Counts:
    """Depends on how many steps there were, which no hop brings along."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, model: Any, batch: Any, optimizers: Any) -> Tensor:
        self.count += 1
        loss = gans.train_gan(model, batch, optimizers)["loss"]
        return loss / self.count


def saves(model: Any, batch: Any, optimizers: Any) -> Tensor:
    loss = gans.train_gan(model, batch, optimizers)["loss"]
    optimizers[1].state_dict()
    return loss


def loads(model: Any, batch: Any, optimizers: Any) -> Tensor:
    optimizers[0].load_state_dict({"state": {}, "param_groups": []})
    return gans.train_gan(model, batch, optimizers)["loss"]


def groups(model: Any, batch: Any, optimizers: Any) -> Tensor:
    optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    return gans.train_gan(model, batch, optimizers)["loss"]


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (forgets, "training_step changes no parameter; it calls backward"),
        (adds, r"adds to gradients that the step before has left, as those of .*'critic.0.weight'"),
        (gathers(2), r"adds to gradients that the step before has left, as those of .*'critic.0"),
        (gathers(7, since=3), "adds to gradients that the step before has left"),
        (freezes, r"leaves requires_grad of parameter 'critic.0.weight' as False"),
        (gives_rows, r"training_step returned shape \(16, 1\) as the loss"),
        (lambda *_: None, "training_step returned None as the loss"),
        (fails, r"the training step failed on a batch with features \(features: float32\[16, 16\]"),
        (Counts(), r"each step changes a value of the training_step at .count"),
        (saves, r"one of several optimizers \(SGD\) for its state_dict .* optimizer.state\[param"),
        (loads, r"one of several optimizers \(Adam\) for its state_dict or load_state_dict"),
        (groups, "has 3 param groups after training and is built with 2"),
    ],
)
def test_a_step_that_can_not_hop_is_refused_at_admission(step: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        hopping.start(built(gans.gan, {}, training_step=step), [[BATCHES[0]]])


class NoValidation(gans.Module):
    validation_step = None  # type: ignore[assignment]


class Automatic(gans.Module):
    automatic_optimization = True


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (NoValidation, "sets automatic_optimization=False and has no validation_step"),
        (Automatic, r"training_step of Automatic reads self.lr_schedulers: it asks the Trainer"),
    ],
)
def test_modules_that_can_not_train_by_hand_are_refused(kind: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Recipe(kind())


def test_a_step_beside_that_of_the_module_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="training_step is given, and Module has one"):
        Recipe(gans.Module(), training_step=gans.train_gan)
