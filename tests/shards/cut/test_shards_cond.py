"""A model with torch.cond trains in one shard, also where several were asked for or have failed."""

from __future__ import annotations

import pytest
import torch

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.admission.profile import TaskProfiler
from tests.shards import zoo
from tests.shards.executors.executor_case import assert_equal_to_plain
from tests.shards.hopping import start
from tests.shards.trials import made

WINDOWS = zoo.singly(zoo.vectors(8, 5))
EXAMPLES = [(batch.features, batch.labels) for window in WINDOWS for batch in window]


class Chooses(zoo.Net):
    def forward(self, x):
        x = self.a(x)
        x = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
        return self.c(self.b(x).tanh())


class ChoosesModules(zoo.Net):
    def forward(self, x):
        x = self.a(x)
        x = torch.cond(x.sum() > 0, lambda y: self.b(y), lambda y: self.b(y).cos(), (x,))
        return self.c(x.tanh())


class Fails(zoo.Net):
    def forward(self, x):
        return self.c(torch.cond(x.sum() > 0, lambda y: y @ y, lambda y: y, (self.a(x),)))


@pytest.mark.parametrize(("model", "cut"), [(Chooses, "modules"), (ChoosesModules, "export")])
def test_several_shards_become_one_and_the_report_says_why(model, cut: str) -> None:
    report = start(made(model, shards=3, cut=cut)(), WINDOWS).admission.report
    assert len(report.shards) == 1
    assert "shards: torch.cond of the forward failed in shards (" in report.text()


@pytest.mark.parametrize("model", [Chooses, ChoosesModules])
def test_it_trains_as_plainly_in_one_shard(model) -> None:
    assert_equal_to_plain(made(model, shards=1), [WINDOWS], "modules")


def test_it_is_refused_where_the_memory_of_tasks_counts_and_trains_elsewhere_afterwards() -> None:
    with pytest.raises(
        ConfigurationError, match=r"failed while its memory was measured .* only on"
    ):
        admit(made(Chooses, shards=1)(), EXAMPLES, 1, profiler=TaskProfiler(None))
    start(made(Chooses, shards=1)(), WINDOWS).train(WINDOWS)


def test_a_branch_that_fails_is_told_and_others_compile_afterwards() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)the forward failed .* same reduction dim"):
        start(made(Fails, shards=1)(), WINDOWS)
    start(made(Chooses, shards=1)(), WINDOWS).train(WINDOWS)
