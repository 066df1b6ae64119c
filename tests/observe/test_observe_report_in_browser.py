"""The report as a person sees it, in a real Chromium; skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.observe.report import REPORT_FILE, render
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune import SearchResult
from tests.journals import rewrite_journal

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
    assert f"{best.history['val_accuracy'][-1]:.4g}" in page.locator("#winner").inner_text()
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
    traceback = page.locator("#trials pre").first
    assert not traceback.is_visible()
    page.locator("#trials summary").first.click()
    assert traceback.is_visible()
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


def test_nothing_went_wrong_and_nothing_was_asked_for(
    page: Any, result: SearchResult, seen: dict[str, list[str]]
) -> None:
    assert seen["errors"] == []
    assert seen["requests"] == [Path(result.run_path, REPORT_FILE).as_uri()]
    page.evaluate("console.error('seen')")  # the check itself can fail
    assert seen["errors"] == ["seen"]
