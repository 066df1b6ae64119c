"""Trials are admitted while others train, and a candidate that hangs costs itself alone."""

from __future__ import annotations

import io
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import DEFAULT_RESOURCES
from cerebro_hydra.hopper.trials import NewTrial
from cerebro_hydra.observe import Decision
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.planning.auto_plan import Outlook
from cerebro_hydra.planning.biller import Biller
from cerebro_hydra.recipe import exclusive_generator
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.tune import CustomSearch, GridSearch, SearchResult, hp_choice
from cerebro_hydra.tune import trials as timed_call
from cerebro_hydra.tune.admission import Admission
from cerebro_hydra.tune.decisions import AskAndTell
from cerebro_hydra.tune.result import print_replays
from cerebro_hydra.tune.searchers.searcher import CandidateList
from cerebro_hydra.tune.searches import ListSearch
from cerebro_hydra.tune.trials import EndOfRun, Overdue, SearchTrials, TimedCall
from tests.end_to_end.runs import Tape
from tests.tune import open_models
from tests.tune.searchers import RUN, Rungs
from tests.tune.test_tune_search import arguments, rows
from tests.tune.trials.test_tune_admission import COLUMNS, examples


def of_tape(path: Path, tape: Tape, **changes: Any) -> dict[str, Any]:
    """The arguments of a search, but for what it goes through."""
    fixed = {"estimator_gen_fn": open_models.patient, "num_epochs": 1, "evaluation_metric": "loss"}
    given = arguments(path, observers=[tape], **{**fixed, **changes})
    del given["search_space"]
    return given


@pytest.mark.slow
def test_the_first_trial_trains_while_the_others_are_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = threading.Event()
    tape = Tape(lambda tape: trained.set() if tape.of(ev.SubEpochDone, last=True) else None)
    monkeypatch.setattr(open_models, "trained", trained)
    space = {"number": hp_choice([0, 1, 2])}
    result = GridSearch(search_space=space, **of_tape(tmp_path, tape)).fit(rows(90))
    assert [(t.status, t.params["number"]) for t in result.trials] == [
        ("finished", 0), ("finished", 1), ("finished", 2)
    ]  # fmt: skip
    kinds = (ev.TrialProposed, ev.SearchClosed, ev.TrialAdded, ev.SubEpochDone)
    found = [type(event) for event in tape.of(kinds)]
    assert found[:6] == [ev.TrialProposed] * 3 + [*kinds[1:]]


@pytest.mark.slow
def test_a_users_searcher_pauses_resumes_and_stops_trials_and_can_be_brought_to_where_it_was(
    tmp_path: Path,
) -> None:
    tape = Tape()
    search = CustomSearch(
        make_searcher=lambda: Rungs(candidates=4, most_epochs=2, forks=False),
        **of_tape(tmp_path, tape, num_epochs=2),
    )
    result = search.fit(rows(90))
    assert sorted(len(t.history["train_loss"]) for t in result.trials) == [1, 1, 2, 2]
    assert {trial.status for trial in result.trials} == {"stopped"}
    assert all(result.get_model(trial.trial_id).state_dict() for trial in result.trials)
    said = io.StringIO()
    assert print_replays(Console(file=said), result.run_path)
    assert "4 of 4 replayed trials are identical" in said.getvalue()
    count = [len(tape.of(kind)) for kind in (ev.TrialPaused, ev.BudgetExtended, ev.TrialResumed)]
    assert count == [6, 2, 2]
    assert len(tape.of(ev.TrialStopped)) == 4
    records = [(each.event, each.instructions) for each in tape.of(Decision)]
    paused = [isinstance(event, ev.TrialPaused) for event, _ in records].index(True)
    (first, *_) = AskAndTell(search.searcher(RUN), 2, 2).replay(records[:paused])
    assert first == records[paused][0], "what was decided, and not journalled, is decided again"
    assert AskAndTell(search.searcher(RUN), 2, 2).replay(records) == []


def test_make_searcher_must_be_a_function(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"make_searcher is .*; give a function"):
        CustomSearch(make_searcher=Rungs(), **of_tape(tmp_path, Tape()))  # type: ignore[arg-type]
    assert CustomSearch(make_searcher=Rungs, **of_tape(tmp_path, Tape())).searcher(RUN).epochs == 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(timed_call, "GRACE_SECONDS", 0.2)
    yield
    # While a thread has an exception to raise, CPython 3.11 ends no call that is profiled.
    open_models.woken.set()
    for thread in threading.enumerate():
        if thread.name == "admission":
            thread.join(60)
            assert not thread.is_alive()
    open_models.woken.clear()


def trials_of(
    path: Path, candidates: list[dict[str, Any]], seconds: float, told: list[str] | None = None
) -> SearchTrials:
    folder = RunFolder(LocalStore(str(path)), "run")
    batches = examples(path, 70)
    quiet: list[str] = [] if told is None else told
    bill = Biller(DEFAULT_RESOURCES, 2, print)
    admission = Admission(
        open_models.hanging, COLUMNS, batches, folder, 3, "loss", quiet.append, bill
    )
    admission.admit(0, {})  # what is imported late is imported
    ask_and_tell = AskAndTell(CandidateList(candidates, 1), 1, 2)
    return SearchTrials(ask_and_tell, admission, folder, seconds, lambda line: None, EndOfRun())


def outcomes(trials: SearchTrials) -> Iterator[Any]:
    """Be the coordinator, which handles everything and trains nothing."""
    news = threading.Condition()
    came: list[Any] = []

    def put(each: Any) -> None:
        with news:
            came.append(each)
            news.notify()

    came += trials.start(put)
    while True:
        with news:
            assert news.wait_for(lambda: came, 60), "nothing more is admitted"
            each = came.pop(0)
        trials.follow(each.event if isinstance(each, NewTrial) else each, [])
        if isinstance(each, NewTrial | ev.TrialRefused):
            yield each


@pytest.mark.parametrize("hangs", ["python", "system"])
def test_a_candidate_that_hangs_is_refused_with_its_stack_and_the_others_are_admitted(
    tmp_path: Path, impatient: None, hangs: str
) -> None:
    # The first is given up before the run begins, the third while it goes on.
    candidates = [{"hangs": hangs}, {}, {"hangs": hangs}, {"lr": 0.2}]
    told: list[str] = []
    trials = trials_of(tmp_path, candidates, 2.0, told)
    trials.admit_first()
    found = outcomes(trials)
    first, second, third, fourth = (next(found) for _ in range(4))
    for refused, number in ((first, 0), (third, 2)):
        assert isinstance(refused, ev.TrialRefused) and refused.trial == number
        assert refused.error.startswith("it is not admitted after admission_seconds=2.0; give it")
        assert "in hanging" in refused.error, "the place where it hangs"
    assert (second.spec.trial, fourth.spec.trial) == (1, 3)
    assert not any("GivenUp" in line for line in told), "its refusal says it"
    assert second.spec.shards == fourth.spec.shards, "the random numbers are a candidate's own"
    trials.close()


def test_a_call_in_time_returns_or_raises_and_leaves_no_setting_to_others() -> None:
    def fails() -> None:
        torch.set_grad_enabled(False)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        TimedCall(fails).result(60)
    assert TimedCall(torch.is_grad_enabled).result(60)


def test_a_call_that_is_given_up_never_goes_on_and_its_lock_is_free(impatient: None) -> None:
    wakes, went_on = threading.Event(), threading.Event()

    def hangs() -> None:
        with exclusive_generator:
            wakes.wait(60)
            went_on.set()

    call = TimedCall(hangs)
    with pytest.raises(Overdue, match=r"wakes\.wait"):
        call.result(0.1)
    with exclusive_generator:
        wakes.set()
        call._thread.join(60)
        assert not went_on.is_set()
        other = TimedCall(exclusive_generator.__enter__)
        with pytest.raises(Overdue):  # what it had taken it does not free again
            other.result(0.1)


def test_a_candidate_under_way_is_given_up_when_the_run_ends(
    tmp_path: Path, impatient: None
) -> None:
    trials = trials_of(tmp_path, [{}, {"hangs": "system"}, {}], seconds=600)
    trials.admit_first()
    found = outcomes(trials)
    assert isinstance(next(found), NewTrial)
    begun = time.monotonic()
    while trials._call is None:
        assert time.monotonic() - begun < 60
    trials.close()
    assert time.monotonic() - begun < 30
    with exclusive_generator:
        pass


def test_a_candidate_that_is_about_to_begin_when_the_run_ends_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    comes, closed = threading.Event(), threading.Event()

    def late(*given: Any) -> Outlook:
        comes.set()
        assert closed.wait(60)
        return Outlook(*given)

    trials = trials_of(tmp_path, [{}, {"hangs": "system"}], seconds=600)
    trials.admit_first()
    monkeypatch.setattr(timed_call, "Outlook", late)
    assert isinstance(next(outcomes(trials)), NewTrial)
    assert comes.wait(60)
    trials.close()
    (search,) = (thread for thread in threading.enumerate() if thread.name == "search")
    closed.set()
    search.join(30)
    assert not search.is_alive()


def test_candidates_of_a_list_are_numbered_in_its_order(tmp_path: Path) -> None:
    tape = Tape()
    search = ListSearch(candidates=[{"b": 1}, {}, {"b": 1}], **of_tape(tmp_path, tape))
    begun = AskAndTell(search.searcher(RUN), 1, 2).begin()
    proposed = [each for each in begun if isinstance(each, ev.TrialProposed)]
    assert [each.trial for each in proposed] == [0, 1, 2]
    assert [each.params for each in proposed] == [{"b": 1}, {}, {"b": 1}]


def begun(path: Path, tape: Tape) -> tuple[GridSearch, RunFolder]:
    """A run of four candidates that has ended."""
    space = {"number": hp_choice([0, 1, -1, 2])}
    search = GridSearch(
        search_space=space, **of_tape(path, tape, estimator_gen_fn=open_models.refusing)
    )
    return search, RunFolder.open(search.fit(rows(90)).run_path)


@pytest.mark.slow
def test_a_run_whose_driver_died_admits_what_was_not_admitted_without_its_search(
    tmp_path: Path,
) -> None:
    tape = Tape()
    search, folder = begun(tmp_path, tape)
    ends = (ev.TrialAdded, ev.TrialRefused)
    kinds = [type(each.event) for each in tape.of(Decision)]
    first = kinds.index(ev.TrialAdded) + 1
    manifest = find_prepared(search.store, SearchResult.open(folder.path).document.fingerprint)
    assert manifest is not None
    records = [(each.event, each.instructions) for each in tape.of(Decision)[:first]]
    for ask_and_tell in (None, AskAndTell(search.searcher(RUN), 1, 2)):
        admission = search._admission(folder, manifest)
        trials = SearchTrials(ask_and_tell, admission, folder, None, lambda line: None, EndOfRun())
        trials.resume(records)
        found = outcomes(trials)
        again = [next(found) for _ in range(3)]
        trials.close()
        said = [each.event if isinstance(each, NewTrial) else each for each in again]
        expected = tape.of(ends)[1:]
        assert [type(each) for each in said] == [type(each) for each in expected]
        assert [said[0], said[2]] == [expected[0], expected[2]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("moment", range(13))
def test_a_call_that_is_given_up_at_any_moment_of_its_end_holds_nobody_up(
    moment: int, impatient: None
) -> None:
    """The exception may come while it leaves the lock, and while it tells that it has ended."""
    moments, comes = itertools.count(), threading.Event()

    def hold(frame: object, event: str, _: object) -> None:
        # CPython raises an exception of another thread when a function begins, or C returns.
        if event in ("call", "c_return") and next(moments) == moment:
            sys.setprofile(None)
            comes.set()
            for _ in range(60_000):
                time.sleep(0.001)

    def ends() -> None:
        with exclusive_generator:
            sys.setprofile(hold)

    def others() -> None:
        call = TimedCall(ends)
        assert comes.wait(60)
        call.give_up()
        with suppress(BaseException):
            call.result(60)
        with exclusive_generator:
            pass

    thread = threading.Thread(target=others, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
