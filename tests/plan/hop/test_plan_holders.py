from __future__ import annotations

from cerebro_hydra.plan.hop.holders import STORE, Holder, Holders


def test_a_state_is_whole_only_where_every_segment_and_its_cursor_are() -> None:
    table = Holders()
    table.define(0, 1, [("f", "a"), ("", "b")])
    table.define(1, 1, [("f", "a"), ("", "b")])  # the same bytes, another trial
    table.add(0, 1, "w")
    assert table.holds(0, 1, "w") and not table.holds(1, 1, "w")
    assert list(table.where(0, 1)) == ["w"]
    assert 0.7 < table.share(1, 1, "w") < 1  # all but the cursor


def test_dropping_a_state_keeps_what_others_name_and_what_is_frozen() -> None:
    table = Holders()
    table.define(0, 1, [("frozen", "same"), ("frozen", "old")])
    table.define(0, 2, [("frozen", "same"), ("frozen", "new")])
    table.add(0, 1, "w")
    table.add(0, 2, "w")
    table.drop(0, 1, "w")
    assert not table.holds(0, 1, "w") and table.holds(0, 2, "w")
    table.drop(0, 2, "w")
    assert list(table) == [Holder("frozen", "w", "dram")]


def test_what_a_lost_worker_held_is_gone_and_the_store_stays() -> None:
    table = Holders()
    table.define(0, 0, [("f", "a")])
    table.define(0, 1, [("f", "b")])
    table.add(0, 0, STORE)
    table.add(0, 1, "w")
    assert list(table.where(0, 1)) == ["w"]
    table.forget_worker("w")
    assert not table.where(0, 1) and list(table.where(0, 0)) == [STORE]
    assert {holder.tier for holder in table} == {STORE}
