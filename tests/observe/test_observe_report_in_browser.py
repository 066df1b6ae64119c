"""The report as a person sees it, in a real Chromium; skipped where there is none."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.observe import Decision, TrialAdmitted
from cerebro_hydra.observe.report import REPORT_FILE, render
from cerebro_hydra.observe.watch import ReportServer
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune import SearchResult
from cerebro_hydra.tune.running import run_claim
from tests.journals import cut_journal, rewrite_journal
from tests.observe.conftest import added, begin, written
from tests.observe.test_observe_devices import devices_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed to look at the page"),
]

# Root needs --no-sandbox; without the others Chromium looks for hosts of its own.
FLAGS = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="module")
def seen() -> dict[str, list[str]]:
    return {"errors": [], "requests": []}


@pytest.fixture(scope="module")
def page(result: SearchResult, seen: dict[str, list[str]]) -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("console", lambda message: seen["errors"].append(message.text))
        page.on("pageerror", lambda error: seen["errors"].append(str(error)))
        page.on("request", lambda request: seen["requests"].append(request.url))
        page.goto(Path(result.run_path, REPORT_FILE).as_uri())
        yield page
        browser.close()


def column(page: Any, number: int) -> list[str]:
    return page.locator(f"#trials tbody td:nth-child({number})").all_inner_texts()


def test_it_shows_winner_trials_curves_and_lanes(page: Any, result: SearchResult) -> None:
    best = result.best_trial
    assert best.trial_id in page.locator("#winner").inner_text()
    assert f"{best.result_metrics['val_accuracy']:.4g}" in page.locator("#winner").inner_text()
    assert page.locator("#trials tbody tr:visible").count() == len(result.trials)
    for name in best.history:
        points = page.locator(f"[data-curve='{name}'] circle").count()
        assert points == sum(len(trial.history.get(name, [])) for trial in result.trials)
    data = page.evaluate("JSON.parse(document.getElementById('data').textContent)")
    for kind in ("train", "evaluate"):
        bars = page.locator(f"#timeline [data-task='{kind}'] .bar").count()
        assert bars == sum(task["kind"] == kind for task in data["tasks"]) > 0
    assert page.locator("#timeline [data-hop]").count() == sum(
        t["hop"] is not None for t in data["tasks"]
    )
    assert page.locator("#timeline .absent").count() == 1


def test_a_click_sorts_and_what_has_no_number_comes_last(page: Any) -> None:
    headings = page.locator("#trials thead th").all_inner_texts()
    number = 1 + headings.index("val_accuracy")
    button = page.locator(f"#trials thead th:nth-child({number}) button")
    button.click()
    rising = column(page, number)
    button.click()
    falling = column(page, number)
    known = [float(text) for text in rising if text != "–"]
    assert known == sorted(known)
    assert len(known) >= 2
    assert falling == [*reversed(rising[: len(known)]), *rising[len(known) :]]
    page.locator("#trials thead th:first-child button").focus()
    for key, sort in (("Enter", "ascending"), ("Space", "descending")):
        page.keyboard.press(key)
        assert page.locator(f"#trials thead th[aria-sort={sort}]").inner_text()[:5] == "Trial"
        assert column(page, 1) == sorted(column(page, 1), reverse=sort == "descending")
    page.keyboard.press("Enter")


def test_pointing_tells_values_and_a_drag_zooms(page: Any, result: SearchResult) -> None:
    page.locator("[data-curve='val_accuracy'] svg").hover()
    words = page.locator("#tip").inner_text()
    assert words.splitlines()[0] == "val_accuracy, epoch 2"
    value = result.best_trial.history["val_accuracy"][1]
    assert f"{result.best_trial.trial_id} {value:.4g}" in " ".join(words.split())

    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.locator("#timeline svg").bounding_box()
    widest = (
        "Math.max(...[...document.querySelectorAll('.bar')].map((bar) => bar.width.baseVal.value))"
    )
    before = page.evaluate(widest)
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 20)
    page.mouse.up()
    assert page.evaluate(widest) > 3 * before
    page.locator("#zoom-all").click()
    assert page.evaluate(widest) == pytest.approx(before)


def test_a_traceback_unfolds_and_a_legend_hides(page: Any) -> None:
    traceback = page.locator("#reasons pre").first
    assert not traceback.is_visible()
    page.locator("#trials td.status a").first.click()
    assert traceback.is_visible()
    assert traceback.bounding_box()["width"] > 1000
    points = page.locator("[data-curve='val_loss'] circle")
    before = points.count()
    page.locator("#legend button").first.click()
    assert points.count() == before - 3


def test_values_that_differ_by_rounding_alone_are_drawn(
    page: Any, result: SearchResult, tmp_path: Path
) -> None:
    shutil.copytree(result.run_path, there := tmp_path / "runs" / "near")
    folder = RunFolder.open(str(there))

    def nearly_equal(told: dict[str, Any]) -> None:
        if told["type"] == "EndEpoch":
            told["metrics"]["val_accuracy"] = [1.0, 1.0 - 2**-53][told["epoch"] % 2]

    rewrite_journal(folder, nearly_equal)
    (there / REPORT_FILE).write_text(render(folder), encoding="utf-8")
    near = page.context.browser.new_page()
    near.goto((there / REPORT_FILE).as_uri())
    assert near.locator("[data-curve='val_accuracy'] circle").count()
    assert near.locator("[data-curve='val_accuracy'] line.grid").count() < 10
    near.close()


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_nothing_is_cut_off(page: Any, result: SearchResult, width: int) -> None:
    narrow = page.context.browser.new_page(viewport={"width": width, "height": 900})
    narrow.goto(Path(result.run_path, REPORT_FILE).as_uri())
    narrow.locator("#reasons summary").first.click()
    assert narrow.evaluate("document.documentElement.scrollWidth") <= width
    assert outside(narrow) == []
    narrow.close()


def outside(page: Any) -> list[str]:
    """Return the texts that do not lie on the screen."""
    found: list[str] = page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].filter((each) => {
        const { left, right, width } = each.getBoundingClientRect();
        return width > 0 && (left < 0 || right > innerWidth + 0.5);
    }).map((each) => each.textContent)""",
        "main :is(h1, h2, p, dd, pre, summary, svg text), #trials.cards :is(button, td)",
    )
    return found


LEFT_OF_CELLS = """all => all.map((each) => Math.round(each.getBoundingClientRect().left))"""


def stays_first(page: Any, table: str) -> bool:
    """Scroll a table to its end and return whether its first column stayed at its left."""
    box, cells = page.locator(f".scroll:has({table})"), page.locator(f"{table} tr > :first-child")
    before = cells.evaluate_all(LEFT_OF_CELLS)
    moved: int = box.evaluate("(box) => { box.scrollLeft = 9999; return box.scrollLeft; }")
    last = page.locator(f"{table} tbody tr:first-child td:last-child").bounding_box()
    assert last["x"] + last["width"] <= page.viewport_size["width"], "all can be scrolled to"
    after = cells.evaluate_all(LEFT_OF_CELLS)
    at_the_first = """(cell) => {
        const { left, top, height } = cell.getBoundingClientRect();
        return cell.contains(document.elementFromPoint(left + 20, top + height / 2));
    }"""
    cells.last.scroll_into_view_if_needed()
    assert cells.last.evaluate(at_the_first), "nothing lies over it"
    return moved > 0 and before == after


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_devices_have_lanes_and_rows_at_every_width(page: Any, tmp_path: Path, width: int) -> None:
    there = tmp_path / REPORT_FILE
    there.write_text(render(devices_run(tmp_path)), encoding="utf-8")
    shown = page.context.browser.new_page(viewport={"width": width, "height": 900})
    shown.goto(there.as_uri())
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    names = shown.locator("#timeline svg > text").all_text_contents()
    assert names == ["worker 0", "device 0", "device 1", "disk"]
    assert shown.locator("#timeline .device").count() == 2 * 2 * 3  # trials of each device's spans
    assert shown.locator("#timeline .move").count() == 3 * 2
    shares = shown.locator("#timeline .device").evaluate_all(
        "all => all.map(e => e.height.baseVal.value)"
    )
    assert max(shares) == 20 and min(shares) == 5  # a quarter of two seconds
    shown.locator("#timeline .device").nth(1).hover()
    assert "trial-000 25 % trial-001 50 %" in " ".join(shown.locator("#tip").inner_text().split())
    cells = shown.locator("#devices tbody :is(td)")
    outside = "all => all.filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).length"
    assert cells.evaluate_all(outside) == 0
    shown.close()


def test_curves_over_decades_have_a_log_axis_and_many_trials_parallel_coordinates(
    page: Any, tmp_path: Path
) -> None:
    started, *admitted = begin(10, params={"lr": 0.1, "fixed": 1})
    trials, decisions = [], []
    for seq, each in enumerate(admitted):
        assert isinstance(each, TrialAdmitted)
        trial = each.spec.trial
        sizes = {f"width_of_layer_{n}": 1 + n * trial for n in range(1, 7)}
        params = {"lr": 1.2345 * 10.0**-trial, "fixed": 1, **sizes}
        trials.append(TrialAdmitted(replace(each.spec, params=params, parameters=1000 + trial)))
        metrics = {"val_loss": 10.0 ** -(trial / 3), "val_accuracy": 0.01 + trial}
        ended = ins.EndEpoch(trial, 0, {"train_loss": 1.0, **metrics})
        told = (ended, ins.FinishTrial(trial, "finished", "", 0))
        decisions.append(Decision(seq, float(seq), added(each), told))
    folder = written(tmp_path, [started, *trials], decisions)
    (tmp_path / REPORT_FILE).write_text(render(folder, importance=True), encoding="utf-8")
    many = page.context.browser.new_page()
    many.goto((tmp_path / REPORT_FILE).as_uri())
    logs = many.locator("figcaption", has_text="log axis").all_inner_texts()
    assert [text.split()[0] for text in logs] == ["val_loss"]
    assert many.locator("#parallel [data-line]").count() == 10
    names = many.locator("#parallel .name").evaluate_all("all => all.map(e => e.firstChild.data)")
    assert names == ["lr", *sizes, "val_loss"]
    assert {*many.locator(".importance dt").all_inner_texts()} == {"lr", *sizes}
    shares = [int(text.rstrip(" %")) for text in many.locator(".importance dd").all_inner_texts()]
    assert shares == sorted(shares, reverse=True) and 95 <= sum(shares) <= 105
    bars = many.locator(".importance span").evaluate_all("all => all.map(e => e.clientWidth)")
    assert bars == sorted(bars, reverse=True) and bars[0] > bars[-1]
    sizes_told = "10 sizes, from 1,000 to 1,009 parameters, in 1 shard"
    assert sizes_told in many.locator("main").inner_text()
    assert page.locator("#parallel").count() == 0, "four trials need none"
    lines_of_numbers = """() => [...document.querySelectorAll("#trials tbody td:is(.num, .param)")]
        .filter((each) => each.getBoundingClientRect().height > 45).length"""
    for width in (390, 800, 1280):
        many.set_viewport_size({"width": width, "height": 900})
        many.reload()
        assert many.locator("#parallel [data-line]").count() == 10
        assert outside(many) == []
        assert many.evaluate(lines_of_numbers) == 0, "a number is on one line"
        assert many.locator("#trials.cards").count() == (width < 900)
    for width in (901, 1280):
        many.set_viewport_size({"width": width, "height": 900})
        assert stays_first(many, "#trials")
    many.close()


COLOURS_OF_RUNGS = """() => {
    const colours = new Set([...document.querySelectorAll("#rungs circle")].flatMap((each) => {
        const { fill, stroke } = getComputedStyle(each);
        return [fill, stroke];
    }));
    const parts = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (text) => parts(text).slice(0, 3).map((each) => each / 255)
        .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
        .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
    const card = light(getComputedStyle(document.getElementById("rungs")).backgroundColor);
    return [...colours].filter((each) => parts(each)[3] !== 0).map(light).map((each) =>
        (Math.max(each, card) + 0.05) / (Math.min(each, card) + 0.05));
}"""  # the contrast of each colour with the card, as WCAG defines it


def test_rungs_tell_who_went_on_and_are_seen_in_both_schemes(page: Any, tmp_path: Path) -> None:
    begun = begin(12)
    happened = [added(each) for each in begun[1:]]
    told: list[tuple[Any, tuple[Any, ...]]] = [(each, ()) for each in happened]
    for trial in range(12):
        losses = {"train_loss": 1.0, "val_loss": 1.0 + trial / 10}
        told.append((ev.TrialPaused(trial, 1), (ins.EndEpoch(trial, 0, losses),)))
    for trial in range(4):
        told.append((ev.TrialResumed(trial), (ins.EndEpoch(trial, 1, losses),)))
    why = "not among the best 4 of 12 trials after epoch 1"
    told += [
        (ev.TrialStopped(trial, why), (ins.FinishTrial(trial, "stopped", why, 2),))
        for trial in range(4, 11)
    ]
    decisions = [Decision(seq, float(seq), *each) for seq, each in enumerate(told)]
    there = tmp_path / REPORT_FILE
    there.write_text(render(written(tmp_path, begun, decisions)), encoding="utf-8")
    for scheme in ("light", "dark"):
        for width in (390, 1280):
            seen = page.context.browser.new_page(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            seen.goto(there.as_uri())
            assert seen.locator("#rungs .name").all_text_contents() == [
                "after epoch 1: 12 came, 4 went on"
            ]
            assert seen.locator("#rungs circle").count() == 12
            assert seen.locator("#rungs circle[fill=transparent]").count() == 8
            contrasts = seen.evaluate(COLOURS_OF_RUNGS)
            assert len(contrasts) == 9, "eight trials have a colour, and the others one"
            assert min(contrasts) >= (3.0 if scheme == "dark" else 2.0)
            assert outside(seen) == []
            for trial, words in ((0, "went on"), (10, f"stopped: {why}"), (11, "interrupted")):
                seen.locator(f"#rungs [data-trial='{trial}'] circle").hover()
                assert seen.locator("#tip").inner_text().splitlines()[-1] == words
            seen.close()


def test_a_page_that_is_watched_keeps_up_with_its_run(
    page: Any, result: SearchResult, tmp_path: Path, seen: dict[str, list[str]]
) -> None:
    shutil.copytree(result.run_path, there := tmp_path / "runs" / "on")
    folder = RunFolder.open(str(there))
    rest = cut_journal(folder, lambda lines: len(lines) // 2)
    with ReportServer(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        watched = page.context.browser.new_page()
        watched.on("console", lambda message: seen["errors"].append(message.text))
        with run_claim(folder):
            watched.goto(server.url)
            assert "the run goes on" in watched.locator(".facts").inner_text()
            watched.locator("#trials th button", has_text="Time").click()
            before = watched.locator("#timeline .bar").count()
            folder.write_segment(1, rest)
        watched.locator("#state").wait_for(state="detached", timeout=10_000)
        assert watched.locator("#timeline .bar").count() > before
        assert watched.locator("#trials th[aria-sort=ascending]").inner_text().startswith("Time")
        watched.close()
        server.shutdown()


def test_nothing_went_wrong_and_nothing_was_asked_for(
    page: Any, result: SearchResult, seen: dict[str, list[str]]
) -> None:
    assert seen["errors"] == []
    assert seen["requests"] == [Path(result.run_path, REPORT_FILE).as_uri()]
    page.evaluate("console.error('seen')")  # the check itself can fail
    assert seen["errors"] == ["seen"]
