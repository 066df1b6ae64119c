"""Architectures out of the zoo that need no environment of its own, and the table of all of it."""

from __future__ import annotations

import pytest

from integration.zoo import catalogue
from integration.zoo.architecture import Architecture
from integration.zoo.measure import WAYS, Measured, measure
from integration.zoo.of_rare_events import EVENTS, is_found
from integration.zoo.of_refusals import REFUSALS, refusal
from integration.zoo.of_torch import ARCHITECTURES as OF_TORCH
from integration.zoo.of_transformers import BY_TYPE
from integration.zoo.results import PAGE, page_with_table, read_results

ROTARY, EXPERTS, VALUES = "llama", "mixtral", "deberta"
OTHERS = "deepseek_v3", "longformer", "longt5", "mamba", "modernbert", "whisper", "xlnet"


def assert_cut_as_asked(measured: Measured) -> None:
    for cut in measured.cuts:
        assert cut.differs is None, cut
        assert cut.way != "modules" or cut.as_asked, cut
        assert cut.as_asked or cut.note, cut


@pytest.mark.parametrize("name", [ROTARY, EXPERTS, VALUES])
def test_a_model_is_cut_by_modules_into_the_shards_asked_for(name: str) -> None:
    assert_cut_as_asked(measure(BY_TYPE[name], ["modules"]))


@pytest.mark.parametrize("habit", OF_TORCH, ids=lambda each: each.name)
def test_a_model_with_a_habit_is_cut_by_modules_as_asked(habit: Architecture) -> None:
    assert_cut_as_asked(measure(habit, ["modules"]))


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_a_model_is_cut_in_both_ways_or_the_report_says_why(name: str) -> None:
    assert_cut_as_asked(measure(BY_TYPE[name], WAYS))


def test_nineteen_of_twenty_architectures_of_others_are_cut_as_asked_and_all_are_exact() -> None:
    results = read_results()
    others = [r for r in results if r.library not in ("torch", "user code")]
    as_asked = [all(c.as_asked for c in r.cuts if c.way == "modules") for r in others]
    assert as_asked.count(True) >= 0.95 * len(others)
    assert [c for r in results for c in r.cuts if c.differs is not None] == []


def test_every_architecture_was_measured() -> None:
    measured = [(each.library, each.name) for each in read_results()]
    zoo = [(each.library, each.name) for each in catalogue.ARCHITECTURES]
    assert measured == zoo, "results.json is old; run make zoo"


def test_the_table_of_models_is_that_of_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_table(page, read_results()), "the table is old; run make zoo"


@pytest.mark.parametrize(("event", "by"), EVENTS, ids=[event.name for event, _ in EVENTS])
def test_a_rare_event_is_found_in_every_cut(event: Architecture, by: str) -> None:
    measured = measure(event, ["modules"])
    assert [cut.got for cut in measured.cuts] == [cut.asked for cut in measured.cuts]
    assert is_found(measured, by), measured.cuts


@pytest.mark.parametrize(("refused", "words"), REFUSALS, ids=[each.name for each, _ in REFUSALS])
def test_what_can_not_be_cut_is_refused_in_its_words(refused: Architecture, words: str) -> None:
    assert words in refusal(refused)
