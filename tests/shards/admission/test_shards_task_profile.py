"""A profile says what a shard's tasks need of a device, and automatic cuts fit devices by it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.sizing.pipeline import Pipeline
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import AdmittedCut, admit
from cerebro_hydra.shards.admission.task_profiler import TaskProfiler, profile
from cerebro_hydra.shards.admission.trial_profile import TaskProfile, TrialProfile
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.shards.cut.sample import Example
from tests.end_to_end.trials.hooked_models import foreseeing
from tests.shards import zoo
from tests.shards.hopping import Trial, start
from tests.shards.trials import mlp_recipe, resnet_recipe

WIDTH, ROWS = 64, 32


def trial_of(model: nn.Module, shards, cut="modules", batch=None, **rules) -> Trial:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards, cut=cut, **rules)
    return start(recipe, [[batch or zoo.vectors(ROWS, features=WIDTH)[0]]])


def tasks_of(trial: Trial, batch=None) -> TaskProfile:
    batch = batch or zoo.vectors(ROWS, features=WIDTH)[0]
    example = (batch.features, batch.labels)
    return profile(trial.recipe, trial.cut_model, trial.layout, example)


def run_of(trial: Trial, recompute: bool = True, batch=None) -> VisitSpec:
    tasks = tasks_of(trial, batch)
    described = TrialProfile.of(trial.recipe, trial.cut_model, trial.layout, tasks)
    return described.training(0, 5, trial.recipe.accumulate, recompute)


def blocks(number: int = 3) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number)),
        nn.Linear(WIDTH, 3),
    )


@pytest.mark.parametrize("cut", ["modules", "export"])
def test_a_profile_counts_what_a_linear_layer_needs(cut):
    trial = trial_of(blocks(), shards=["1", "2"], cut=cut)
    found = run_of(trial)
    first, second, _ = found.shards
    value = ROWS * WIDTH * 4
    weights = (WIDTH * WIDTH + WIDTH) * 4
    for shard, layout in zip(found.shards, trial.layout.shards, strict=True):
        assert shard.state == layout.nbytes
        assert min(shard.forward, shard.backward, shard.update) > 0
    # What stands for a weight that is away has a row and a column of it, or a vector, and a copy.
    stand_ins = 2 * len(list(trial.recipe.model.children())) * 3 * WIDTH * 4
    # One value goes from shard to shard, or one to each unit; the rest is there throughout.
    assert value <= first.boundary <= 2 * value + 1024 + stand_ins
    assert value <= second.boundary <= 2 * value
    # A backward has the gradients of its weights and makes optimizer state in the first step.
    assert weights <= second.activations <= 6 * weights + 8 * value
    assert not tasks_of(trial).shared


def test_gradients_count_into_the_state_where_they_outlive_a_task():
    plainly, clipped = (
        run_of(trial_of(blocks(), ["1", "2"], **rules)).shards[1].state
        for rules in ({}, {"clip_grad_norm": 1.0})
    )
    gradients = (WIDTH * WIDTH + WIDTH) * 4
    assert gradients <= clipped - plainly <= gradients + 4 * 64


@pytest.mark.parametrize("rules", [{"clip_grad_norm": 1.0}, {"accumulate": 2}, {}])
def test_gradients_count_once_where_no_activations_were_measured(rules):
    trial = trial_of(blocks(), ["1", "2"], **rules)
    found = TrialProfile.of(trial.recipe, trial.cut_model, trial.layout, None)
    bytes_of = [shard.frozen + shard.trainable + shard.gradients for shard in found.shards]
    window = trial.recipe.accumulate
    assert found.training(0, 4, window, recompute=False).device_need == sum(bytes_of)
    assert found.training(0, 4, window, recompute=True).device_need == max(bytes_of)
    assert not found.recomputes(None, sum(bytes_of), window), "it would fit as it is"
    assert found.recomputes(None, sum(bytes_of) - 1, window)


def test_without_recomputation_activations_stay_and_nothing_else_is_held():
    trial = trial_of(blocks(), ["1", "2"])
    kept, again = run_of(trial, recompute=False), run_of(trial)
    assert [shard.boundary for shard in kept.shards] == [0, 0, 0]
    assert kept.keeps_all and not again.keeps_all
    assert kept.graph.microbatches == 5
    assert again.device_need < kept.device_need


class ReadsFirst(nn.Module):
    """Lets every layer read what the first one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(7)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) + first
        return self.head(x)


def test_a_gradient_that_each_shard_adds_to_crosses_anew_wherever_its_memory_lies():
    trial = trial_of(ReadsFirst(), [f"layers.{k}" for k in range(1, 7)], cut="export")
    nbytes = ROWS * WIDTH * 4
    # That of the first layer's value and that of the layer before, which are one for layer 1.
    expected = [(1, 1, nbytes)] + [(k, k, nbytes) for k in range(2, 7) for _ in range(2)]
    held = []
    for number in range(20):
        assert sorted(tasks_of(trial).crossing.gradients) == expected
        held.append(torch.empty(number, ROWS, WIDTH))  # so that others get other addresses


class ReadsBack(nn.Module):
    """Calls its first layer again at the end, and reads the weight of its second one by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return self.head(x @ self.layers[1].weight)


def test_parameters_that_other_shards_read_are_found():
    trial = trial_of(ReadsBack(), ["layers.1", "layers.2", "layers.3"])
    found = tasks_of(trial)
    assert {"layers.0.weight", "layers.0.bias", "layers.1.weight"} <= set(found.shared)
    assert not {"layers.2.weight", "layers.3.weight"} & set(found.shared)


def test_a_forward_that_moves_statistics_writes_to_its_shard():
    trial = start(resnet_recipe(["blocks.0", "blocks.2"])(), zoo.singly(zoo.images(6)))
    batch = zoo.images(6)[0]
    assert all(shard.forward_writes for shard in run_of(trial, batch=batch).shards)
    trial = start(mlp_recipe()(), zoo.singly(zoo.vectors(8)))
    batch = zoo.vectors(8)[0]
    assert not any(shard.forward_writes for shard in run_of(trial, batch=batch).shards)


def test_a_profile_changes_nothing_and_goes_through_json():
    trial = trial_of(blocks(), ["1", "2"])
    before = {n: t.clone() for n, t in trial.recipe.model.state_dict().items()}
    random_state = torch.default_generator.get_state()
    found = tasks_of(trial)
    assert torch.equal(torch.default_generator.get_state(), random_state)
    for name, tensor in trial.recipe.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert TaskProfile.from_json(json.loads(json.dumps(found.to_json()))) == found


SMALL_WIDTH, FEW_ROWS = 48, 2
EXAMPLE = ((torch.randn(FEW_ROWS, SMALL_WIDTH),), (torch.tensor([0, 2]),))
PLENTY = 1 << 20


def recipe(layers: int = 8, dropout: float = 0.1, **options) -> Recipe:
    torch.manual_seed(0)
    block = [
        nn.Sequential(nn.Linear(SMALL_WIDTH, SMALL_WIDTH), nn.ReLU(), nn.Dropout(dropout))
        for _ in range(layers)
    ]
    model = nn.Sequential(*block, nn.Linear(SMALL_WIDTH, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"shards": "auto", **options}
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), **options)


def admitted(budget: int | None, **options) -> AdmittedCut:
    return admit(recipe(**options), [EXAMPLE], 3, None, TaskProfiler(budget))


def shards_of(cut: AdmittedCut) -> int:
    return len(cut.spec.at) + 1


def need_of(cut: AdmittedCut, budget: int, buffers: int) -> int:
    assert cut.profile is not None
    again = cut.profile.recomputes(None, budget, 1)
    return max(
        run.buffered_need(buffers)
        for run in (cut.profile.training(0, 1, 1, again), cut.profile.evaluation(0, 1))
    )


def test_without_a_budget_or_without_need_a_model_stays_whole():
    assert shards_of(admitted(PLENTY)) == 1
    assert shards_of(admit(recipe(), [EXAMPLE], 3)) == 1


@pytest.mark.parametrize("budget", [300_000, 160_000])
def test_an_automatic_cut_fits_with_its_double_buffer_where_fewer_shards_do_not(budget):
    cut = admitted(budget)
    assert 1 < shards_of(cut) < 9
    assert need_of(cut, budget, buffers=2) <= budget
    # Bytes of units are added up, which may be a little more than a shard needs.
    fewer = admitted(budget, shards=shards_of(cut) - 1)
    assert need_of(fewer, budget, buffers=2) > 0.9 * budget


def test_a_device_without_room_for_two_shards_holds_one_at_a_time():
    cut = admitted(100_000)
    assert need_of(cut, 100_000, buffers=1) <= 100_000 < need_of(cut, 100_000, buffers=2)


def test_an_evaluation_has_room_for_a_batch_that_is_larger_than_all_that_train():
    rows, pipeline = FEW_ROWS + 33, Pipeline("gpipe", 2, None)
    larger = ((torch.randn(rows, SMALL_WIDTH),), (torch.zeros(rows, dtype=torch.long),))

    def admitted(example: Example, *evaluated: int) -> tuple[VisitSpec, VisitSpec]:
        made = recipe(shards=2, schedule="gpipe")
        cut = admit(made, [example], 3, None, TaskProfiler(None, devices=2), 1, evaluated)
        evaluation = cut.profile.evaluation(0, 2, pipeline)
        return cut.profile.training(0, 1, 1, True, pipeline), evaluation

    trained, evaluated = admitted(EXAMPLE, FEW_ROWS, rows)
    alone, least = admitted(EXAMPLE)
    _, most = admitted(larger)
    assert trained.boundary_bytes == alone.boundary_bytes
    assert least.boundary_bytes < evaluated.boundary_bytes == most.boundary_bytes
    needs = [[shard.activations for shard in each.shards] for each in (least, evaluated, most)]
    assert needs[0] < needs[1] == needs[2]


def test_a_unit_that_no_device_can_hold_is_named():
    with pytest.raises(ConfigurationError, match=r"^module '\d[.\d]*' needs .* of a device"):
        admitted(30_000)


def test_older_weights_that_no_cut_has_room_for_are_told_with_what_is_enough():
    def admitted(budget: int) -> AdmittedCut:
        made = recipe(schedule="pipedream", vertical_sync=True)
        return admit(made, [EXAMPLE], 3, None, TaskProfiler(budget, devices=2))

    with pytest.raises(ConfigurationError, match="other cuts need no less") as refused:
        admitted(98_000)
    told = re.search(r"give the devices at least ([\d.]+) KiB", str(refused.value))
    assert told is not None and (enough := int(float(told[1]) * 1024)) > 98_000
    assert shards_of(admitted(enough)) > 1


def test_activations_are_kept_where_they_fit_and_made_again_elsewhere():
    for budget, again in ((PLENTY, False), (300_000, True)):
        profile = admitted(budget, shards=3).profile
        assert profile is not None and profile.recomputes(None, budget, 1) is again
        assert profile.training(0, 1, 1, again).device_need <= budget
    kept = profile.training(0, 1, 1, recompute=False)
    assert kept.recompute is False and kept.device_need > budget


def test_activations_that_are_kept_at_any_rate_leave_a_model_whole():
    assert shards_of(admitted(160_000, recompute=False)) == 1


def test_equal_structures_share_a_profile_and_have_equal_cuts():
    profiler, cache = TaskProfiler(160_000), CutModelCache()
    first, second = (
        admit(recipe(clip_grad_value=limit), [EXAMPLE], 3, cache, profiler) for limit in (1.0, 2.0)
    )
    assert first.spec == second.spec
    assert first.profile is not None and second.profile is not None
    assert first.profile.tasks is second.profile.tasks
    other = admit(recipe(layers=9), [EXAMPLE], 3, cache, profiler)
    assert other.profile is not None and other.profile.tasks is not first.profile.tasks


class Table(nn.Module):
    """Has much memory and takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(1024, SMALL_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows[0]


class Slow(nn.Module):
    """Has little memory and takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(SMALL_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            with torch.no_grad():
                self.weight @ self.weight
        return x @ self.weight


def test_as_many_shards_as_asked_for_have_like_bytes_where_memory_binds_and_else_like_times():
    def cut_for(budget: int) -> tuple[list[str], int]:
        body = [*(Table() for _ in range(4)), *(Slow() for _ in range(4))]
        model = nn.Sequential(*body, nn.Linear(SMALL_WIDTH, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        made = Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=2)
        cut = admit(made, [EXAMPLE], 3, None, TaskProfiler(budget))
        return list(cut.spec.at), max(shard.nbytes for shard in cut.layout.shards)

    by_time, all_tables = cut_for(64 * PLENTY)
    by_bytes, half_of_them = cut_for(2 * all_tables)
    assert by_time[0] in ("5@0", "6@0", "7@0") and by_bytes == ["2@0"]
    assert half_of_them < 0.6 * all_tables


@pytest.mark.parametrize("shards", [2, 3, "auto"])
def test_a_write_that_measuring_meets_leads_to_one_shard(shards):
    made = replace(foreseeing({"writes": "to a buffer", "from_the_start": True}), shards=shards)
    batch = (torch.randn(8, 16),), (torch.randint(0, 4, (8,)),)
    cut = admit(made, [batch], 3, None, TaskProfiler(2_600 if shards == "auto" else 36_000))
    assert shards_of(cut) == 1
    assert "was written to before its shard had come" in str(cut.report)


class Carries(nn.Module):
    """Gives a layer a buffer, and makes it anew while the layer needs it for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(SMALL_WIDTH, SMALL_WIDTH)
        self.out = nn.Linear(SMALL_WIDTH, 3)
        self.register_buffer("carried", torch.zeros(SMALL_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.cell(x, self.carried.expand(len(x), -1))
        if self.training:
            self.carried = hidden.detach().mean(0)
        return self.out(hidden)


class Differentiates(nn.Module):
    """Calls a layer within a transform, which torch runs no checkpoint in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SMALL_WIDTH, SMALL_WIDTH)
        self.inner = nn.Linear(SMALL_WIDTH, SMALL_WIDTH)
        self.out = nn.Linear(SMALL_WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.out(x + torch.func.grad(lambda v: self.inner(v).tanh().sum())(x))


@pytest.mark.parametrize("shards", [3, "auto"])
@pytest.mark.parametrize("model", [Carries, Differentiates])
def test_a_cut_that_can_not_be_measured_leads_to_fewer_shards(model, shards):
    torch.manual_seed(0)
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    given = Recipe(made, optimizer, nn.CrossEntropyLoss(), shards=shards)
    units = sum(isinstance(layer, nn.Linear | nn.GRUCell) for layer in made.modules())
    cut = admit(given, [EXAMPLE], 3, None, TaskProfiler(PLENTY))
    assert shards_of(cut) < units
    assert cut.profile is not None and cut.profile.tasks is not None
    assert shards == "auto" or "a step failed: RuntimeError" in str(cut.report)


class Centred(nn.Sequential):
    """Takes off a mean of its own, which is NaN until the first step."""

    def __init__(self) -> None:
        widths = [SMALL_WIDTH] * 3
        super().__init__(*map(nn.Linear, widths, [*widths[1:], 3]))
        self.register_buffer("mean", torch.full((3,), torch.nan))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.training:
            now = out.detach().mean(0)
            self.mean.copy_(torch.where(self.mean.isnan(), now, self.mean.lerp(now, 0.1)))
        return out - self.mean


@pytest.mark.parametrize("cut", ["modules", "export"])
def test_a_model_whose_loss_is_nan_before_its_first_step_alone_is_measured(cut):
    torch.manual_seed(0)
    made = Centred()
    optimizer = torch.optim.AdamW(made.parameters())
    given = Recipe(made, optimizer, nn.CrossEntropyLoss(), shards=2, cut=cut)
    found = admit(given, [EXAMPLE], 3, None, TaskProfiler(PLENTY))
    assert found.profile is not None and found.profile.tasks is not None
