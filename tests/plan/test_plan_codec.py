from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.errors import ConfigurationError, JournalError
from cerebro_hydra.plan.codec import from_json, to_json
from cerebro_hydra.plan.events import EvaluationDone, Event, StateReceived
from cerebro_hydra.plan.hop_config import HopConfig, TrialConfig
from cerebro_hydra.plan.instructions import Instruction, MergeMetrics, StateSource

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
records = st.one_of(*(st.from_type(kind) for kind in (*get_args(Event), *get_args(Instruction))))
configs = st.integers(1, 3).flatmap(
    lambda trials: st.builds(
        HopConfig,
        st.tuples(
            *(
                st.builds(
                    TrialConfig,
                    trial=st.just(t),
                    cost=st.floats(0.1, 9.0),
                    nbytes=st.integers(0, 10**12),
                    patience=st.none() | st.integers(1, 9),
                )
                for t in range(trials)
            )
        ),
        partitions=st.integers(1, 9),
        epochs=st.integers(1, 9),
        order=st.sampled_from(["dynamic", "seeded"]),
    )
)


@given(records | configs)
def test_everything_round_trips_through_json(obj: object) -> None:
    assert from_json(json.loads(json.dumps(to_json(obj)))) == obj


def test_the_form_in_the_journal_is_stable() -> None:
    assert to_json(StateReceived(1, 2, "w")) == {
        "type": "StateReceived",
        "trial": 1,
        "visit": 2,
        "incarnation": "w",
    }
    assert to_json(StateSource(3, None)) == {"type": "StateSource", "visit": 3, "incarnation": None}


GOOD = {"type": "StateReceived", "trial": 1, "visit": 2, "incarnation": "w"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "Nothing"}, "unknown record type 'Nothing'"),
        ({"type": 3}, "unknown record type 3"),
        ({"extra": 1}, r"unknown fields: \['extra'\]"),
        ({"visit": "2"}, r"StateReceived.visit can't be read from '2'"),
        ({"visit": True}, r"StateReceived.visit can't be read from True"),
        ({"visit": 2**64}, r"StateReceived.visit can't be read from 18446744073709551616"),
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
    ("change", "message"),
    [
        ({"order": "random"}, "order='random' is unknown"),
        ({"partitions": 0}, "partitions=0 must be at least 1"),
        ({"epochs": 0}, "epochs=0"),
        ({"trials": ()}, "at least one trial"),
        ({"trials": (TrialConfig(1, 1.0, 0, ()),)}, "trial 1 stands at index 0"),
        ({"trials": (TrialConfig(0, float("nan"), 0, ()),)}, "cost=nan"),
        ({"direction": "up"}, "direction='up' is unknown"),
        ({"trials": (TrialConfig(0, 1.0, 0, (), (), 0),)}, "patience=0 of trial 0 must be a whole"),
        ({"trials": (TrialConfig(0, 1.0, 0, (), (), 1.5),)}, "patience=1.5 of trial 0"),
        (
            {
                "trials": (TrialConfig(0, 1.0, 0, (), (), 1),),
                "evaluate": False,
                "metric": "val_loss",
            },
            "trial 0 has patience with metric='val_loss', which needs validation data",
        ),
    ],
)
def test_a_run_that_cannot_start_is_refused(change: dict, message: str) -> None:
    good = {"trials": (TrialConfig(0, 1.0, 0, ()),), "partitions": 1, "epochs": 1}
    with pytest.raises(ConfigurationError, match=message):
        HopConfig(**(good | change))
