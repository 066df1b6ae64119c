from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.errors import ConfigurationError, JournalError
from cerebro_hydra.plan.messages.codec import from_json, to_json
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.device_work import DeviceWork
from cerebro_hydra.plan.messages.events import (
    EvaluationDone,
    Event,
    RecutState,
    StateReceived,
    TrialProposed,
    TrialRecut,
)
from cerebro_hydra.plan.messages.instructions import Instruction, MergeMetrics, StateSource

st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(int, st.integers(-(2**63), 2**64 - 1))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
states = st.dictionaries(st.text(), json_values, max_size=3)
st.register_type_strategy(EvaluationDone, st.builds(EvaluationDone, states=states))
st.register_type_strategy(MergeMetrics, st.builds(MergeMetrics, states=st.lists(states).map(tuple)))
params = st.dictionaries(st.text(), json_values, max_size=3)
st.register_type_strategy(TrialProposed, st.builds(TrialProposed, params=params))
seconds, count = st.floats(0, 1e9), st.integers(0, 2**63 - 1)
spans = st.lists(st.tuples(seconds, seconds, st.lists(st.tuples(count, seconds)).map(tuple)))
works = st.builds(
    DeviceWork,
    *(st.integers(-1, 9), seconds, seconds, count, count, count, st.none() | count),
    *(spans.map(tuple), spans.map(tuple)),
)
st.register_type_strategy(DeviceWork, works)
trials = st.builds(
    TrialConfig,
    trial=st.integers(0, 2**63),
    cost=st.floats(0.1, 9.0),
    patience=st.none() | st.integers(1, 9),
    keep=st.sampled_from(["best", "last"]),
)
st.register_type_strategy(TrialConfig, trials)
recut_states = st.builds(RecutState, cursor=st.none() | params)
recut = st.builds(TrialRecut, states=st.lists(recut_states).map(tuple), document=params)
st.register_type_strategy(TrialRecut, recut)
records = st.one_of(*(st.from_type(kind) for kind in (*get_args(Event), *get_args(Instruction))))
configs = st.builds(
    HopConfig, partitions=st.integers(1, 9), order=st.sampled_from(["dynamic", "seeded"])
)


@given(records | configs)
def test_everything_round_trips_through_json(obj: object) -> None:
    assert from_json(json.loads(json.dumps(to_json(obj)))) == obj


def test_the_form_in_the_journal_is_stable() -> None:
    assert to_json(StateReceived(1, 2, "w")) == {
        "type": "StateReceived",
        "trial": 1,
        "state": 2,
        "incarnation": "w",
    }
    assert to_json(StateSource(3, None)) == {"type": "StateSource", "state": 3, "incarnation": None}


GOOD = {"type": "StateReceived", "trial": 1, "state": 2, "incarnation": "w"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "Nothing"}, "unknown record type 'Nothing'"),
        ({"type": 3}, "unknown record type 3"),
        ({"extra": 1}, r"unknown fields: \['extra'\]"),
        ({"state": "2"}, r"StateReceived.state can't be read from '2'"),
        ({"state": True}, r"StateReceived.state can't be read from True"),
        ({"state": 2**64}, r"StateReceived.state can't be read from 18446744073709551616"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict, message: str) -> None:
    with pytest.raises(JournalError, match=message):
        from_json(GOOD | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(JournalError, match=r"fields: \['incarnation'\]"):
        from_json({key: value for key, value in GOOD.items() if key != "incarnation"})


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="neither an event"):
        to_json([1])


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (HopConfig, {"order": "random"}, "order='random' is unknown"),
        (HopConfig, {"partitions": 0}, "partitions=0 must be at least 1"),
        (HopConfig, {"direction": "up"}, "direction='up' is unknown"),
        (TrialConfig, {"trial": -1}, "trial=-1 is negative"),
        (TrialConfig, {"cost": float("nan")}, "cost=nan of trial 0"),
        (TrialConfig, {"patience": 0}, "patience=0 of trial 0 must be a whole"),
        (TrialConfig, {"patience": 1.5}, "patience=1.5 of trial 0"),
        (TrialConfig, {"keep": "first"}, "keep='first' of trial 0 is unknown"),
    ],
)
def test_a_run_that_cannot_start_is_refused(kind: type, change: dict, message: str) -> None:
    good = {
        HopConfig: {"partitions": 1},
        TrialConfig: {"trial": 0, "cost": 1.0, "nbytes": 0, "initial_digests": ()},
    }
    with pytest.raises(ConfigurationError, match=message):
        kind(**(good[kind] | change))


def test_a_trial_that_compares_by_what_is_not_evaluated_is_refused() -> None:
    config = HopConfig(1, evaluate=False, metric="val_loss")
    with pytest.raises(ConfigurationError, match=r"trial 0 compares .* needs validation data"):
        config.check_trial(TrialConfig(0, 1.0, 0, (), (), 1))
