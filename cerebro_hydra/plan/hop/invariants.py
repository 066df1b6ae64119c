"""Checks the invariants of a :class:`HopState`, which hold after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cerebro_hydra.plan.hop.holders import STORE
from cerebro_hydra.plan.hop.trials import Attempt, TrialProgress, best_visit, result_visit

if TYPE_CHECKING:
    from cerebro_hydra.plan.hop.state import HopState


def check(state: HopState) -> None:
    """Raise AssertionError for the first broken invariant, naming it and its object."""
    state.tables.check_indexes()
    _check_agents(state)
    for index, trial in state.trials.items():
        _check_visits(state, index, trial)
        _check_pending_visits(index, trial)
        _check_states(state, index, trial)
        for attempt in trial.attempts:
            _check_attempt(state, trial, attempt)
        runs = trial.status == "running"
        assert runs == bool(trial.attempts), f"trial {index} is {trial.status}: {trial.attempts}"
    owned = [a.number for trial in state.trials.values() for a in trial.attempts]
    assert sorted(owned) == sorted(state.attempts), "an attempt belongs to no trial, or to two"
    both = state.trials.keys() & state.tables.candidates.keys()
    assert not both, f"the trials {both} are candidates too"
    none_left = state.tables.search_closed and not state.tables.candidates
    over = none_left and all(trial.over for trial in state.trials.values())
    assert state.finished == over, f"finished is {state.finished}, but everything over is {over}"
    awaiting = sorted(index for index, trial in state.trials.items() if trial.awaits is not None)
    noted = sorted(fork for forks in state.tables.forks.values() for fork in forks)
    assert awaiting == noted, f"the forks {awaiting} wait for their states, and {noted} are noted"


def _check_agents(state: HopState) -> None:
    live = {agent.incarnation for agent in state.workers}
    for holder in state.holders:
        assert holder.where == STORE or holder.where in live, f"{holder} is not alive"
    for agent in state.workers:
        for attempt in agent.attempts:
            assert state.attempts.get(attempt.number) is attempt, f"{attempt} is over"
            assert attempt.incarnation == agent.incarnation, f"{attempt} is elsewhere"
            reserved = attempt.status == "reserved"
            assert reserved == (attempt in agent.reserved), f"{attempt} is at the wrong place"
        assert len(agent.started) <= agent.residents, f"{agent.started} are too many residents"
        assert agent.load <= agent.residents, (
            f"{agent.attempts} are more than {agent.residents} and those ending"
        )
        trained = [attempt.trial for attempt in agent.started if attempt.kind == "train"]
        assert len(trained) == len(set(trained)), f"{agent.started} train a trial twice at once"
        for attempt in agent.reserved:
            pending = state.trials[attempt.trial].pending_visits
            follows = pending[1:] == [attempt] and pending[0].incarnation == agent.incarnation
            full = len(agent.started) == agent.residents
            assert full or follows, f"{attempt} waits for nothing"


def _check_visits(state: HopState, index: int, trial: TrialProgress) -> None:
    partitions = state.config.partitions
    seen: set[tuple[int, int]] = set()
    for place, visit in enumerate(trial.visits):
        assert visit.epoch == place // partitions, f"trial {index} visit {place + 1}: wrong epoch"
        key = (visit.epoch, visit.partition)
        assert key not in seen, f"trial {index} trained twice on (epoch, partition) {key}"
        seen.add(key)
    complete, begun = divmod(len(trial.visits), partitions)
    ended = len(trial.history)
    assert ended <= complete, f"trial {index} ended epoch {ended - 1} before training it"
    late = complete - ended
    assert late == 0 or (late == 1 and begun == 0), f"trial {index} goes on before its evaluation"
    if trial.merge_attempt is not None:
        whole = late == 1 and trial.evaluation.done.bit_count() == partitions
        assert whole, f"trial {index} merges its metrics before it is evaluated everywhere"
    visits = trial.trained.bit_count() + len(trial.pending_visits)
    assert trial.visited().bit_count() == visits, f"trial {index} would visit a partition twice"


def _check_pending_visits(index: int, trial: TrialProgress) -> None:
    """Check that a trial has one writer, and at most one successor that waits for it."""
    count = len(trial.pending_visits)
    assert count <= 2, f"trial {index} has {count} pending visits at once"
    for ahead, attempt in enumerate(trial.pending_visits, start=1):
        assert attempt.visit == trial.newest + ahead == attempt.source.visit + 1, f"{attempt}"
    if trial.pending_visits:
        assert not trial.evaluations, f"trial {index} trains while it is evaluated"
        assert trial.pending_visits[0].done is None, (
            f"{trial.pending_visits[0]} is done but not committed"
        )
    if len(trial.pending_visits) == 2:
        first, second = trial.pending_visits
        assert first.status == "ending", f"{second} waits for {first}, which is not ending"
        assert second.source.incarnation == first.incarnation, f"{second} has another source"


def _check_states(state: HopState, index: int, trial: TrialProgress) -> None:
    visits = state.holders.visits(index)
    if trial.saving is not None:
        assert state.workers.get(trial.saving[1]), (
            f"trial {index} is saved by {trial.saving[1]}: lost"
        )
        held = state.holders.holds(index, *trial.saving)
        assert held, f"trial {index}: state {trial.saving} is being saved, and dropped"
    if trial.awaits is not None:
        assert not visits, f"trial {index} waits for its first state and has {visits}"
        return
    pinned = {state.trials[fork].base for fork in state.tables.forks.get(index, ())}
    for visit in pinned:
        if trial.makes_again(visit):
            continue
        assert state.holders.where(index, visit), f"trial {index}: a fork waits for state {visit}"
    if trial.status == "paused":
        assert trial.rest_at == len(trial.history), f"trial {index} rests before {trial.rest_at}"
        assert not trial.attempts, f"trial {index} is paused and runs"
        stored = all(state.holders.holds(index, v, STORE) for v in state.retention.needed(trial))
        assert stored or trial.saving, f"trial {index} is paused, and nothing is saved"
    if trial.lacking is not None:
        assert not trial.attempts, f"trial {index} is to be cut finer and runs"
    if trial.recutting is not None and not trial.over:
        stored = all(state.holders.holds(index, v, STORE) for v in trial.recutting)
        assert stored, f"trial {index} is cut finer, and {trial.recutting} are not all in the store"
    if trial.over:
        assert not trial.attempts, f"trial {index} is over and runs"
        for visit in visits:
            copies = {(visit, place) for place in state.holders.where(index, visit)}
            extra = copies - {(visit, STORE), trial.saving}
            assert visit in pinned or not extra, f"trial {index} is over and has {extra}"
        if trial.status != "failed":
            assert trial.result == result_visit(state.config, trial), (
                f"trial {index}: another result"
            )
            saved = state.holders.holds(index, trial.result, STORE)
            assert saved, f"trial {index}: its result, state {trial.result}, is not in the store"
        return
    assert max(visits) <= trial.newest, f"trial {index}: states {visits} of {trial.newest} visits"
    for visit in state.retention.needed(trial):
        assert state.holders.where(index, visit), f"trial {index}: state {visit} is nowhere"
    best = best_visit(state.config, trial, trial.newest)
    if best is not None and not state.holders.holds(index, best, STORE):
        assert trial.saving, f"trial {index}: state {best} is its best, and nothing is saved"
    for lost in state.workers:
        back = state.retention.fallback(index, trial, lost.incarnation)
        assert back <= trial.newest, f"trial {index} would not outlive worker {lost.worker}"


def _check_attempt(state: HopState, trial: TrialProgress, attempt: Attempt) -> None:
    agent = state.workers.get(attempt.incarnation)
    assert agent is not None, f"{attempt} has no live agent"
    assert (attempt.status == "done") == (attempt.done is not None), f"{attempt} is contradictory"
    if attempt.done is None:
        assert attempt in agent.attempts, f"{attempt} is not what its agent does"
    if attempt.status in ("reserved", "fetching") and trial.pending_visits[1:] != [attempt]:
        place = attempt.source.incarnation or STORE
        there = any(
            state.holders.holds(attempt.trial, attempt.source.visit, each)
            for each in (place, attempt.incarnation)
        )
        assert there, f"{attempt} starts from a state that {place} does not hold"
    if attempt.kind == "evaluate":
        assert attempt.visit == attempt.source.visit == trial.newest, f"{attempt} looks elsewhere"
