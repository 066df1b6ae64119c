"""A shard that has left its memory: what is held of it, what is refused, and how a visit pauses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from contextvars import ContextVar

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import Cancelled, ConfigurationError, NonFiniteLoss, StepDiffers
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.recipe.randomness import without_fast_path
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.admission.task_profiler import TaskProfiler
from cerebro_hydra.shards.engine.bound_model import HeldTensors
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.layout import aligned, in_place, memory_of, on_host
from cerebro_hydra.shards.engine.microbatch import Execution, MemoryLimit, Reach
from cerebro_hydra.shards.engine.module_tasks import PausedPass
from cerebro_hydra.shards.engine.visit_run import VisitRun
from tests.shards import zoo
from tests.shards.admission.test_shards_task_profile import WIDTH, ReadsBack
from tests.shards.executors.alone import train_alone
from tests.shards.executors.executor_case import Proof, described
from tests.shards.executors.worker import shard_run
from tests.shards.hopping import Trial, start
from tests.shards.trials import Make, mlp_recipe, resnet_recipe, seeded

F, B = ActionKind.F, ActionKind.B
WINDOWS = [zoo.vectors(5, seed=2)]


def trained(make: Make, windows, shared=(), share: float | None = None) -> None:
    """Train with each shard alone in memory, within a share of what tasks were measured to hold."""
    proof = Proof(make, [windows], make().cut)
    most = None
    if share is not None:
        spec = proof.profile.training(0, 1, 1, recompute=True)
        most = [int(nbytes * share) for nbytes in spec.task_bytes]
    visit = shard_run(proof.trial, windows, shared=shared, most=most)
    proof.check([train_alone(proof.trial, [visit], windows)])


def test_parameters_that_other_shards_read_are_held_if_the_profile_names_them():
    make = seeded(ReadsBack, ["layers.1", "layers.2", "layers.3"], cut="modules")
    windows = [zoo.vectors(8, features=WIDTH)]
    trained(make, windows, Proof(make, [windows], "modules").profile.tasks.shared)
    with pytest.raises(StepDiffers, match=r"enters 'layers.0@1' while another shard runs"):
        trained(make, windows)


class KeepsAView(zoo.Net):
    """Adds a view of a parameter of its first layer in every later one."""

    class Prefix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return self.weight.expand(len(x), -1)

    def add(self):
        self.prefix = self.Prefix()

    def forward(self, x):
        prefix = self.prefix(x)
        x = torch.tanh(self.a(x + prefix))
        x = torch.tanh(self.b(x + prefix))
        return self.c(x + prefix)


def test_a_view_of_a_parameter_that_the_forward_keeps_is_an_error_by_modules():
    make = seeded(KeepsAView, ["b", "c"], cut="modules")
    with pytest.raises(StepDiffers, match=r"keeps a view of parameter 'prefix.weight'"):
        trained(make, [zoo.vectors(8)])
    trained(make, [zoo.vectors(8)], shared=["prefix.weight"])


def test_a_view_of_a_parameter_crosses_a_cut_graph():
    trained(seeded(KeepsAView, ["b", "c"], cut="export"), [zoo.vectors(8)])


class Block(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(super().forward(x))


class PenalizesGradients(nn.Module):
    """Computes gradients in its forward, whose graph keeps the weights until the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x = x.detach().requires_grad_()
        with torch.enable_grad():
            for block in self.blocks:
                h = block(h)
            out = self.head(h)
            (gradient,) = torch.autograd.grad(out.logsumexp(1).sum(), x, create_graph=True)
        return out + gradient.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("shards", [4, "auto"])
def test_a_forward_that_keeps_weights_for_its_backward_is_one_shard(shards: int | str) -> None:
    """That its shards can't leave a device is found where memory is measured."""
    ((batch,),) = zoo.singly(zoo.vectors(8))
    examples = [(batch.features, batch.labels)]
    make = seeded(PenalizesGradients, shards)
    found = admit(make(), examples, 7, profiler=TaskProfiler(1 << 20))
    assert not found.spec.at
    if shards == "auto":
        assert "by modules: the forward keeps a view of parameter" in found.report.text()


class Towers(nn.Module):
    """Adds two towers of the same inputs: the second one is given nothing that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a1, self.a2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b1, self.b2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.c = nn.Linear(6, 3)

    def forward(self, x):
        first = self.a2(torch.tanh(self.a1(x)))
        return self.c(torch.tanh(first + self.b2(torch.tanh(self.b1(x)))))


class Forks(Towers):
    """Gives both towers what its first layer returns."""

    def forward(self, x):
        x = self.a1(x)
        return self.c(torch.tanh(self.a2(x) + self.b2(torch.tanh(self.b1(x)))))


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize(("model", "shards"), [(Towers, ["b1", "c"]), (Forks, ["a2", "b1", "c"])])
def test_a_shard_whose_values_pass_the_next_one_by_is_back_for_its_backward(
    model: type[nn.Module], shards: list[str], autocast: str | None
) -> None:
    trained(seeded(model, shards, cut="modules", autocast=autocast), zoo.singly(zoo.vectors(8, 8)))


class RootScale(zoo.Net):
    """Reads a parameter of its own at its end."""

    def add(self):
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.scale


def test_without_what_is_held_the_bits_are_others(monkeypatch):
    """The negative control: buffers and shared parameters have to be held."""
    make = seeded(RootScale, ["b", "c"], cut="modules")
    trained(make, zoo.singly(zoo.vectors(8, 8)))
    monkeypatch.setattr(HeldTensors, "hold", lambda self, state: {})
    with pytest.raises((AssertionError, NonFiniteLoss, StepDiffers, RuntimeError)):
        trained(make, zoo.singly(zoo.vectors(8, 8)))


def test_gradients_wait_for_a_shard_that_was_there_without_room_for_them():
    """A later shard's backward gives them to one that stayed with its parameters alone."""
    make = seeded(RootScale, ["b", "c"], cut="modules", accumulate=2)
    windows = [zoo.vectors(8, 8), zoo.vectors(8, seed=2)]
    proof = Proof(make, [windows], "modules")
    visit = shard_run(proof.trial, windows, shared=proof.profile.tasks.shared)
    proof.check([train_alone(proof.trial, [visit], windows, lingers=True)])


def small_trial() -> Trial:
    return start(mlp_recipe(cut="modules")(), WINDOWS)


def load(visit: VisitRun | ShardEvaluation, trial: Trial, *shards: int) -> None:
    for k in shards:
        segments, cursor = trial.need(k)
        given = on_host(in_place(segments))
        visit.load(k, given, cursor) if isinstance(visit, VisitRun) else visit.load(k, given)


def test_a_run_that_keeps_activations_has_its_shards_throughout():
    trial = small_trial()
    visit = shard_run(trial, WINDOWS, recompute=False)
    load(visit, trial, 0)
    visit.perform(Action(0, 0, F, 0))
    with pytest.raises(ValueError, match="shard 0 is unloaded before its backward"):
        visit.unload(0)
    visit.cancel()


def test_tasks_out_of_order_and_shards_out_of_place_are_refused():
    trial = small_trial()
    visit = shard_run(trial, WINDOWS)
    with pytest.raises(ValueError, match="t0s0F0 can't be done; load its shard before"):
        visit.perform(Action(0, 0, F, 0))
    load(visit, trial, 0, 1)
    with pytest.raises(ValueError, match="shard 1 is loaded already"):
        load(visit, trial, 1)
    segments, cursor = trial.need(2)
    skewed = memory_of(aligned(segments["trainable"].nbytes + 64)[64:])
    with pytest.raises(ValueError, match="the memory of shard 2 is not aligned to 256 bytes"):
        visit.load(2, on_host(in_place(segments)) | {"trainable": skewed}, cursor)
    visit.perform(Action(0, 0, F, 0))
    with pytest.raises(ValueError, match=r"t0s1B0 can't come now; .* before \('F', 1\)"):
        visit.perform(Action(0, 1, B, 0))
    visit.cancel()


@pytest.mark.parametrize("done", [0, 1, 4])
def test_a_cancelled_run_ends_its_thread_and_gives_the_model_back(done):
    trial = small_trial()
    before = {n: p.data_ptr() for n, p in trial.recipe.model.named_parameters()}
    threads = set(threading.enumerate())
    visit = shard_run(trial, WINDOWS)
    load(visit, trial, 0, 1, 2)
    for kind, k in [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0)][:done]:
        visit.perform(Action(0, k, kind, 0))
    visit.cancel()
    assert set(threading.enumerate()) == threads
    assert {n: p.data_ptr() for n, p in trial.recipe.model.named_parameters()} == before
    trial.train(WINDOWS)


TOO_LARGE = (
    r"^a batch of shape \[8, 6\] takes .* of a device beside its shard, and with device_memory it "
    r"may have .*; let collate limit the size of a batch, or use a smaller batch_size"
)


def test_a_batch_that_takes_more_than_was_measured_is_an_error_of_memory():
    make, windows = mlp_recipe(cut="modules"), zoo.singly(zoo.vectors(8))
    trained(make, windows, share=1.0)
    with pytest.raises(MemoryError, match=TOO_LARGE):
        trained(make, windows, share=0.6)


@pytest.mark.parametrize("cut", ["export", "modules"])
@pytest.mark.parametrize("share", [1.0, 0.9])
def test_activations_that_are_kept_count_until_their_backward(cut: str, share: float):
    recipe, windows = resnet_recipe(3)(), zoo.singly(zoo.images(6))
    recipe.cut = cut
    trial = start(recipe, windows)
    spec = described(trial, windows).training(0, 1, 1, recompute=False)
    most = [int(nbytes * share) for nbytes in spec.task_bytes]
    visit = shard_run(trial, windows, recompute=False, most=most)
    load(visit, trial, *range(len(spec.shards)))
    try:
        with pytest.raises(MemoryError) if share < 1 else nullcontext():
            for task in spec.graph.tasks(0, 0):
                visit.perform(task)
    finally:
        visit.cancel()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_an_evaluation_holds_what_was_measured_and_no_more(share: float):
    trial = start(mlp_recipe(cut="modules")(), zoo.singly(zoo.vectors(8)))
    spec = described(trial, zoo.singly(zoo.vectors(8))).evaluation(0, 1)
    limit = MemoryLimit(0, [int(nbytes * share) for nbytes in spec.task_bytes])
    visit = ShardEvaluation(trial.runtime(), zoo.vectors(8), Execution(limit=limit))
    load(visit, trial, *range(len(spec.shards)))

    try:
        with pytest.raises(MemoryError) if share < 1 else nullcontext():
            for task in TaskGraph(len(spec.shards), 1, training=False).tasks(0, 0):
                visit.perform(task)
    finally:
        visit.close()


def test_the_fast_path_stays_off_until_the_last_thread_has_left():
    first, second = without_fast_path(), without_fast_path()
    enabled: Callable[[], bool] = torch.backends.mha.get_fastpath_enabled
    before = enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not enabled()
    second.__exit__(None, None, None)
    assert enabled() == before


def test_random_numbers_go_on_where_the_run_left_them() -> None:
    drawn: list[torch.Tensor] = []

    def run(reach: Reach) -> None:
        torch.manual_seed(3)
        for kind in ("F", "B"):
            reach(kind, 0)
            drawn.append(torch.rand(2))

    paused = PausedPass()
    paused.begin(run)
    for _ in range(2):
        torch.rand(5)  # another visit draws, too
        paused.advance()
    paused.close()
    torch.manual_seed(3)
    assert torch.equal(torch.cat(drawn), torch.rand(4))


def test_what_a_step_raises_is_raised_by_its_advance() -> None:
    def run(reach) -> None:
        reach("F", 0)
        raise KeyError("lost")

    paused = PausedPass()
    assert paused.begin(run) == ("F", 0)
    with pytest.raises(KeyError, match="lost"):
        paused.advance()
    assert paused.begin(run) == ("F", 0), "the next microbatch begins on the same thread"
    paused.close()


def test_a_microbatch_runs_with_the_threads_and_the_context_of_who_began_it() -> None:
    name: ContextVar[str] = ContextVar("name")
    name.set("trial 3")
    seen: list[object] = []

    def run(reach) -> None:
        reach("F", 0)
        seen.extend([torch.get_num_threads(), name.get(), torch.is_grad_enabled()])

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        paused = PausedPass()
        paused.begin(run)
        paused.advance()
        paused.close()
    finally:
        torch.set_num_threads(before)
    assert seen == [2, "trial 3", True]


def test_a_closed_run_ends_where_it_stands() -> None:
    seen: list[object] = []

    def run(reach) -> None:
        try:
            for k in range(3):
                reach("F", k)
                seen.append(k)
        except Cancelled as error:
            seen.append(str(error))
            raise

    paused = PausedPass()
    paused.begin(run)
    paused.advance()
    paused.close()
    assert seen == [0, "a visit was cancelled before F of shard 1"]


def test_a_cancelled_run_ends_though_its_code_takes_no_error_for_an_answer() -> None:
    paused, reached = PausedPass(), list[int]()

    def stubborn(reach: Reach) -> None:
        for shard in range(3):
            with suppress(Exception):
                reach("F", shard)
                reached.append(shard)

    assert paused.begin(stubborn) == ("F", 0)
    closing = threading.Thread(target=paused.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    for _ in range(2):
        paused.close()
    assert reached == []


def test_what_comes_between_two_steps_is_done_on_the_thread_of_the_run() -> None:
    threads: list[threading.Thread] = []

    def note(*_: object) -> None:
        threads.append(threading.current_thread())

    def fail() -> None:
        raise ValueError("the user's schedule is wrong")

    def steps(reach: Reach) -> None:
        for kind in ("F", "B"):
            reach(kind, 0)
            note()

    visit = PausedPass()
    visit.begin(steps)
    visit.call(note)
    with pytest.raises(ValueError, match="schedule"):
        visit.call(fail)
    assert visit.advance() == ("B", 0)
    visit.call(note)
    assert visit.advance() is None
    visit.call(note)
    visit.close()
    assert len(threads) == 5
    assert {thread.name for thread in threads} == {"paused-pass"}


class HandsOn(zoo.Net):
    """Hands one buffer on to another in each step, while a later shard than theirs runs."""

    def add(self):
        for name in ("new", "old", "oldest"):
            self.register_buffer(name, torch.zeros(6))

    def forward(self, x):
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        if self.training:
            new = 0.9 * self.new + 0.1 * hidden.detach().mean(0)
            self.oldest, self.old, self.new = self.old, self.new, new
        return self.c(hidden - self.new + 0.5 * self.old - 0.2 * self.oldest)


def test_buffers_whose_copies_are_handed_on_keep_their_values():
    make = seeded(HandsOn, ["b", "c"], cut="modules")
    windows = [zoo.vectors(8), zoo.vectors(8, seed=1)]
    trained(make, windows, shared=["new", "old", "oldest"])


class BeginsAgain(zoo.Net):
    """Gives a buffer the memory of an attribute late, and moves it in place from then on."""

    def add(self):
        self.first = torch.ones(6)
        self.register_buffer("now", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        if self.training:
            self.steps += 1
            if self.steps == 4:
                self.now = self.first
            self.now += 0.1
        return self.c(hidden - self.now)


def test_a_buffer_that_moves_in_memory_of_an_attribute_is_refused_though_its_shard_left():
    make = seeded(BeginsAgain, ["b", "c"], cut="modules")
    windows = [zoo.vectors(8, seed=seed) for seed in range(7)]
    told = "gave buffer 'now' the memory of a tensor that something else refers to"
    with pytest.raises(ConfigurationError, match=told):
        trained(make, windows, shared=["now", "steps"])
