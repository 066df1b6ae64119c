"""Trials whose shards come to a device and leave it, in any order, have the bits of plain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.shard_run import ShardRun
from tests.plan.rules import at_random
from tests.shards import plain, zoo
from tests.shards.by_task.device_loop import DeviceLoop, Resident, spec_of
from tests.shards.engine.test_shards_equivalence import language_recipe, mlp_recipe, resnet_recipe
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, start


class Encoder(nn.Module):
    """Blocks of attention with dropout, a mask in a buffer and a learned position outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.position = nn.Parameter(torch.randn(12, 16) * 0.1)
        self.register_buffer("mask", torch.full((12, 12), -1e9).triu(1))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = self.mask[: tokens.shape[1], : tokens.shape[1]]  # a view that every block reads
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x * self.scale)


def encoder_recipe(**rules) -> Callable[[], Recipe]:
    def make() -> Recipe:
        torch.manual_seed(8)
        model = Encoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return Recipe(model, optimizer, zoo.language_loss, shards=3, **rules)

    return make


def llama_recipe(**rules) -> Callable[[], Recipe]:
    def make() -> Recipe:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(9)
        config = LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
            use_cache=False,
        )  # fmt: skip
        model = zoo.Logits(LlamaForCausalLM(config))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Recipe(model, optimizer, zoo.language_loss, shards=3, **rules)

    return make


def first_frozen() -> nn.Module:
    model = zoo.mlp()
    model[0].requires_grad_(False)
    return model


def halves(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [*model.parameters()]
    groups = [{"params": parameters[:3], "lr": 0.03}, {"params": parameters[3:], "lr": 0.01}]
    return torch.optim.SGD(groups, momentum=0.9)


VECTORS = [zoo.singly(zoo.vectors(8, 8, 5)), zoo.singly(zoo.vectors(8, 5, seed=1))]
PAIRS = [[zoo.vectors(8, 8), zoo.vectors(5, seed=2)], [zoo.vectors(8, 5, seed=1)]]
IMAGES = [zoo.singly(zoo.images(6, 6, 4)), zoo.singly(zoo.images(6, 4, seed=1))]
IMAGE_PAIRS = [[zoo.images(6, 6), zoo.images(4)], [zoo.images(6, 4, seed=1)]]
TOKENS = [zoo.singly(zoo.tokens(4, 4)), zoo.singly(zoo.tokens(4, 3, seed=1))]
TOKEN_PAIRS = [[zoo.tokens(4, 4), zoo.tokens(3)], [zoo.tokens(4, 3, seed=1)]]


TRIALS = {
    "accumulation, schedule": (
        mlp_recipe(halves, accumulate=2, lr_scheduler=lambda o: lrs.StepLR(o, 2)),
        PAIRS,
    ),
    "frozen, clipping": (mlp_recipe(model=first_frozen, clip_grad_norm=0.5), VECTORS),
    "average, clipped values": (mlp_recipe(ema=0.9, clip_grad_value=0.1), VECTORS),
    "norms of batches, clipping": (resnet_recipe(3), IMAGES),
    "encoder, autocast, accumulation": (
        encoder_recipe(autocast="bfloat16", accumulate=2),
        TOKEN_PAIRS,
    ),
    "tied, accumulation, clipping": (
        language_recipe(accumulate=2, clip_grad_norm=0.5),
        TOKEN_PAIRS,
    ),
    "llama": (llama_recipe(), TOKENS),
}


class Together:
    """Trials that train at one worker, and what each is to become."""

    def __init__(self, names: Sequence[str], cut: str = "modules") -> None:
        self.sub_epochs = [TRIALS[name][1] for name in names]
        self.trials: list[Trial] = []
        self.expected: list[object] = []
        self.measured: list[object] = []
        for name, sub_epochs in zip(names, self.sub_epochs, strict=True):
            recipe, reference = TRIALS[name][0](), TRIALS[name][0]()
            recipe.cut = cut
            trial = start(recipe, [w for windows in sub_epochs for w in windows])
            assert trial.admission.spec.mode == cut, trial.admission.report.text()
            assert trial.cut_model.num_shards == 3, name
            sums, training = plain.train(reference, sub_epochs, STEPS_PER_EPOCH)
            averages = {n: plain.bits(t) for n, t in training.tensors().items() if n[:4] == "ema:"}
            self.expected.append((sums, plain.everything(reference), averages))
            self.measured.append(training.evaluate(sub_epochs[0][0]))
            self.trials.append(trial)
        self.initial = [trial.shards.copy() for trial in self.trials]

    def run_eagerly(self) -> Together:
        """Let the models' own forwards run in place of graphs."""
        for trial in self.trials:
            trial.cut_model = trial.cut_model.eager(trial.recipe.model)
        return self

    def train(self, seed: int, share: float, recompute: bool = True, devices: int = 1) -> None:
        """Train from state 0 with a hop after each sub-epoch, then evaluate; compare every bit."""
        sums: list[list[float]] = [[] for _ in self.trials]
        for trial, initial in zip(self.trials, self.initial, strict=True):
            trial.shards, trial.step = initial.copy(), 0
        for number in range(len(self.sub_epochs[0])):
            runs = []
            for which, trial in enumerate(self.trials):
                windows = self.sub_epochs[which][number]
                run = ShardRun(trial.runtime(), recompute, trial.step, windows)
                spec = spec_of(which, trial, sum(map(len, windows)), recompute)
                runs.append(Resident(trial, run, spec))
            DeviceLoop(runs, at_random(seed), seed, share, devices).run()
            for trial, each, losses in zip(self.trials, runs, sums, strict=True):
                trial.step += each.run.totals.steps
                losses.append(each.run.totals.loss_sum)
        evaluations = self._evaluate(seed, share)
        for number, (trial, losses) in enumerate(zip(self.trials, sums, strict=True)):
            averages = {n: plain.bits(t) for n, t in trial.tensors().items() if n[:4] == "ema:"}
            found = losses, plain.everything(trial.loaded()), averages
            assert found == self.expected[number]
            assert evaluations[number] == self.measured[number]

    def _evaluate(self, seed: int, share: float) -> list[object]:
        runs = []
        for which, trial in enumerate(self.trials):
            batches = self.sub_epochs[which][0][0]
            run = ShardEvaluation(trial.runtime(), batches)
            runs.append(Resident(trial, run, spec_of(which, trial, len(batches), True, False)))
        DeviceLoop(runs, at_random(seed), seed, share).run()
        return [each.run.result for each in runs]


@pytest.fixture(scope="module")
def together() -> Together:
    return Together(list(TRIALS))


@pytest.mark.parametrize(("seed", "share"), [(0, 1 / 2), (1, 1 / 8), (2, 1 / 8)])
def test_trials_whose_shards_come_and_go_have_the_bits_of_plain_training(together, seed, share):
    together.train(seed, share)


def test_trials_that_keep_their_activations_share_a_device(together):
    together.train(7, 1 / 2, recompute=False)


def test_a_graph_cut_goes_through_the_same_run():
    Together(["average, clipped values"], "export").train(1, 1 / 8, devices=2)


@pytest.mark.long
def test_every_graph_cut_goes_through_the_same_run():
    together = Together(list(TRIALS), "export")
    for share in (1 / 2, 1 / 8):
        together.train(2, share, devices=2)


def test_a_graph_cut_can_be_run_by_its_modules():
    Together(["norms of batches, clipping"], "export").run_eagerly().train(1, 1 / 8)


@pytest.mark.long
def test_every_graph_cut_can_be_run_by_its_modules():
    together = Together(list(TRIALS), "export").run_eagerly()
    for recompute in (True, False):
        together.train(2, 1 / 4, recompute)
