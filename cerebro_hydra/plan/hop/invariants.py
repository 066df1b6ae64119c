"""Names the invariants of a run, each a small function; they hold after every event."""

from __future__ import annotations

from collections.abc import Callable

from cerebro_hydra.plan.hop.checkpoints import Retention
from cerebro_hydra.plan.hop.holders import STORE
from cerebro_hydra.plan.hop.tables import LiveAgent, RunTables
from cerebro_hydra.plan.hop.trial_status import (
    AwaitingParent,
    Ended,
    MergingMetrics,
    Recutting,
    TrialStatus,
)
from cerebro_hydra.plan.hop.trials import Attempt, TrialProgress, best_state, result_state


def check(tables: RunTables) -> None:
    """Raise AssertionError for the first broken invariant, naming it and its object."""
    tables.check_indexes()
    for of_run in _OF_A_RUN:
        of_run(tables)
    for agent in tables.workers:
        for of_agent in _OF_AN_AGENT:
            of_agent(tables, agent)
    for index, trial in tables.trials.items():
        for of_trial in _OF_A_TRIAL:
            of_trial(tables, index, trial)
        for attempt in trial.attempts:
            for of_attempt in _OF_AN_ATTEMPT:
                of_attempt(tables, trial, attempt)


# ---------------------------------------------------------------------- of a run


def _holders_live(tables: RunTables) -> None:
    live = {agent.incarnation for agent in tables.workers}
    for holder in tables.holders:
        assert holder.where == STORE or holder.where in live, f"{holder} is not alive"


def _attempts_have_one_trial(tables: RunTables) -> None:
    owned = [a.number for trial in tables.trials.values() for a in trial.attempts]
    assert sorted(owned) == sorted(tables.attempts), "an attempt belongs to no trial, or to two"


def _trials_are_no_candidates(tables: RunTables) -> None:
    both = tables.trials.keys() & tables.candidates.keys()
    assert not both, f"the trials {both} are candidates too"


def _the_run_ends_with_its_trials(tables: RunTables) -> None:
    none_left = tables.search_closed and not tables.candidates
    over = none_left and all(trial.over for trial in tables.trials.values())
    assert tables.finished == over, f"finished is {tables.finished}, but everything over is {over}"


def _forks_are_noted(tables: RunTables) -> None:
    awaiting = sorted(
        (trial.stage.parent, index)
        for index, trial in tables.trials.items()
        if isinstance(trial.stage, AwaitingParent)
    )
    noted = sorted((parent, fork) for parent, forks in tables.forks.items() for fork in forks)
    assert awaiting == noted, f"the forks {awaiting} wait for their states, and {noted} are noted"


_OF_A_RUN: tuple[Callable[[RunTables], None], ...] = (
    _holders_live,
    _attempts_have_one_trial,
    _trials_are_no_candidates,
    _the_run_ends_with_its_trials,
    _forks_are_noted,
)


# ---------------------------------------------------------------------- of an agent


def _attempts_are_where_they_say(tables: RunTables, agent: LiveAgent) -> None:
    for attempt in agent.attempts:
        assert tables.attempts.get(attempt.number) is attempt, f"{attempt} is over"
        assert agent.incarnation in attempt.incarnations, f"{attempt} is elsewhere"
        reserved = attempt.status == "reserved"
        assert reserved == (attempt in agent.reserved), f"{attempt} is at the wrong place"


def _agents_hold_no_more_than_they_can(tables: RunTables, agent: LiveAgent) -> None:
    assert len(agent.started) <= agent.residents, f"{agent.started} are too many residents"
    assert agent.load <= agent.residents, (
        f"{agent.attempts} are more than {agent.residents} and those ending"
    )


def _agents_train_a_trial_once(tables: RunTables, agent: LiveAgent) -> None:
    trained = [attempt.trial for attempt in agent.started if attempt.kind == "train"]
    assert len(trained) == len(set(trained)), f"{agent.started} train a trial twice at once"


def _reserved_attempts_wait_for_something(tables: RunTables, agent: LiveAgent) -> None:
    for attempt in agent.reserved:
        pending = tables.trials[attempt.trial].pending_visits
        follows = pending[1:] == [attempt] and pending[0].incarnation == agent.incarnation
        full = len(agent.started) == agent.residents
        assert full or follows, f"{attempt} waits for nothing"


_OF_AN_AGENT: tuple[Callable[[RunTables, LiveAgent], None], ...] = (
    _attempts_are_where_they_say,
    _agents_hold_no_more_than_they_can,
    _agents_train_a_trial_once,
    _reserved_attempts_wait_for_something,
)


# ---------------------------------------------------------------------- of a trial


def _each_partition_once_per_epoch(tables: RunTables, index: int, trial: TrialProgress) -> None:
    partitions = tables.config.partitions
    seen: set[tuple[int, int]] = set()
    for place, visit in enumerate(trial.visits):
        assert visit.epoch == place // partitions, f"trial {index} visit {place + 1}: wrong epoch"
        key = (visit.epoch, visit.partition)
        assert key not in seen, f"trial {index} trained twice on (epoch, partition) {key}"
        seen.add(key)
    visits = trial.trained.bit_count() + sum(len(each.ranks) for each in trial.pending_visits)
    assert trial.visited().bit_count() == visits, f"trial {index} would visit a partition twice"


def _epochs_end_before_the_next(tables: RunTables, index: int, trial: TrialProgress) -> None:
    complete, begun = divmod(len(trial.visits), tables.config.partitions)
    ended = len(trial.history)
    assert ended <= complete, f"trial {index} ended epoch {ended - 1} before training it"
    late = complete - ended
    assert late == 0 or (late == 1 and begun == 0), f"trial {index} goes on before its evaluation"


def _merges_come_last(tables: RunTables, index: int, trial: TrialProgress) -> None:
    if isinstance(trial.stage, MergingMetrics):
        done = trial.evaluation.done.bit_count() == tables.config.partitions
        whole = done and trial.epoch_trained(tables.config.partitions)
        assert whole, f"trial {index} merges its metrics before it is evaluated everywhere"


def _the_status_is_what_attempts_say(tables: RunTables, index: int, trial: TrialProgress) -> None:
    said = f"trial {index} is {trial.status}: {trial.attempts}"
    assert (trial.status is TrialStatus.TRAINING) == bool(trial.pending_visits), said
    assert (trial.status is TrialStatus.EVALUATING) == bool(trial.evaluations), said


def _one_writer_and_one_successor(tables: RunTables, index: int, trial: TrialProgress) -> None:
    pending = trial.pending_visits
    assert len(pending) <= 2, f"trial {index} has {len(pending)} pending visits at once"
    before = trial.newest
    for attempt in pending:
        made = attempt.source.state + len(attempt.ranks)
        assert attempt.source.state == before and attempt.state == made, f"{attempt}"
        before = attempt.state
    if pending:
        assert pending[0].done is None, f"{pending[0]} is done but not committed"
    if len(pending) == 2:
        first, second = pending
        assert first.status == "ending", f"{second} waits for {first}, which is not ending"
        assert second.source.incarnation == first.incarnation, f"{second} has another source"
        assert not (first.others or second.others), f"{second} of replicas follows {first}"


def _what_is_written_is_held(tables: RunTables, index: int, trial: TrialProgress) -> None:
    if (copy := tables.saving.get(index)) is not None:
        assert tables.workers.get(copy[1]), f"trial {index} is saved by {copy[1]}: lost"
        held = tables.holders.holds(index, *copy)
        assert held, f"trial {index}: state {copy} is being saved, and dropped"


def _forks_begin_with_nothing(tables: RunTables, index: int, trial: TrialProgress) -> None:
    states = tables.holders.states(index)
    assert not (trial.awaits and states), f"trial {index} waits for its first state, has {states}"


def _forked_states_are_kept(tables: RunTables, index: int, trial: TrialProgress) -> None:
    for state in _pinned(tables, index):
        again = trial.makes_again(state, tables.config.partitions)
        kept = trial.awaits or again or tables.holders.where(index, state)
        assert kept, f"trial {index}: a fork waits for state {state}"


def _paused_trials_rest_in_the_store(tables: RunTables, index: int, trial: TrialProgress) -> None:
    if trial.awaits or not trial.paused:
        return
    epochs = trial.told_epochs
    assert epochs == len(trial.history), f"trial {index} rests before epoch {epochs}"
    assert not trial.attempts, f"trial {index} is paused and runs"
    needed = Retention(tables).needed(trial)
    stored = all(tables.holders.holds(index, state, STORE) for state in needed)
    assert stored or index in tables.saving, f"trial {index} is paused, and nothing is saved"


def _cuts_are_made_of_stored_states(tables: RunTables, index: int, trial: TrialProgress) -> None:
    if isinstance(trial.stage, Recutting):
        states = trial.stage.states
        stored = all(tables.holders.holds(index, state, STORE) for state in states)
        assert stored, f"trial {index} is cut finer, and {states} are not all in the store"


def _ended_trials_keep_their_result(tables: RunTables, index: int, trial: TrialProgress) -> None:
    if isinstance(trial.stage, Ended) and trial.status is not TrialStatus.FAILED:
        result = trial.stage.result
        assert result == result_state(tables.config, trial), f"trial {index}: another result"
        saved = tables.holders.holds(index, result, STORE)
        assert saved, f"trial {index}: its result, state {result}, is not in the store"
        complete = len(trial.history) >= trial.told_epochs
        assert complete, f"trial {index} ended without epochs of which the search was told"


def _ended_trials_leave_the_workers(tables: RunTables, index: int, trial: TrialProgress) -> None:
    if trial.over:
        pinned = _pinned(tables, index)
        for state in tables.holders.states(index):
            copies = {(state, place) for place in tables.holders.where(index, state)}
            extra = copies - {(state, STORE), tables.saving.get(index)}
            assert state in pinned or not extra, f"trial {index} is over and has {extra}"


def _needed_states_are_held(tables: RunTables, index: int, trial: TrialProgress) -> None:
    if not (trial.over or trial.awaits):
        states, holders = tables.holders.states(index), tables.holders
        assert max(states) <= trial.newest, (
            f"trial {index}: states {states} of {trial.newest} visits"
        )
        for state in Retention(tables).needed(trial):
            assert holders.where(index, state), f"trial {index}: state {state} is nowhere"


def _the_best_state_is_written(tables: RunTables, index: int, trial: TrialProgress) -> None:
    if not (trial.over or trial.awaits):
        best = best_state(tables.config, trial, trial.newest)
        stored = best is None or tables.holders.holds(index, best, STORE)
        assert stored or index in tables.saving, (
            f"trial {index}: state {best} is its best, and nothing is saved"
        )


def _any_one_worker_may_be_lost(tables: RunTables, index: int, trial: TrialProgress) -> None:
    if not (trial.over or trial.awaits):
        for agent in tables.workers:
            back = Retention(tables).fallback(index, trial, agent.incarnation)
            assert back <= trial.newest, f"trial {index} would not outlive worker {agent.worker}"


def _pinned(tables: RunTables, index: int) -> set[int]:
    """Return the states that forks of a trial wait for."""
    return {tables.trials[fork].base for fork in tables.forks.get(index, ())}


_OF_A_TRIAL: tuple[Callable[[RunTables, int, TrialProgress], None], ...] = (
    _each_partition_once_per_epoch,
    _epochs_end_before_the_next,
    _merges_come_last,
    _the_status_is_what_attempts_say,
    _one_writer_and_one_successor,
    _what_is_written_is_held,
    _forks_begin_with_nothing,
    _forked_states_are_kept,
    _paused_trials_rest_in_the_store,
    _cuts_are_made_of_stored_states,
    _ended_trials_keep_their_result,
    _ended_trials_leave_the_workers,
    _needed_states_are_held,
    _the_best_state_is_written,
    _any_one_worker_may_be_lost,
)


# ---------------------------------------------------------------------- of an attempt


def _attempts_are_at_their_agent(tables: RunTables, trial: TrialProgress, attempt: Attempt) -> None:
    assert (attempt.status == "done") == (attempt.done is not None), f"{attempt} is contradictory"
    workers = {rank.worker for rank in attempt.ranks}
    assert len(workers) == len(attempt.ranks), f"{attempt} has two ranks at one worker"
    for incarnation in attempt.incarnations:
        agent = tables.workers.get(incarnation)
        assert agent is not None, f"{attempt} has no live agent {incarnation}"
        if attempt.done is None:
            assert attempt in agent.attempts, f"{attempt} is not what its agent does"


def _attempts_have_a_source(tables: RunTables, trial: TrialProgress, attempt: Attempt) -> None:
    if attempt.status in ("reserved", "fetching") and trial.pending_visits[1:] != [attempt]:
        place = attempt.source.incarnation or STORE
        there = any(
            tables.holders.holds(attempt.trial, attempt.source.state, each)
            for each in (place, attempt.incarnation)
        )
        assert there, f"{attempt} starts from a state that {place} does not hold"


def _evaluations_are_of_the_newest_state(
    tables: RunTables, trial: TrialProgress, attempt: Attempt
) -> None:
    if attempt.kind == "evaluate":
        assert attempt.state == attempt.source.state == trial.newest, f"{attempt} looks elsewhere"


_OF_AN_ATTEMPT: tuple[Callable[[RunTables, TrialProgress, Attempt], None], ...] = (
    _attempts_are_at_their_agent,
    _attempts_have_a_source,
    _evaluations_are_of_the_newest_state,
)
