"""The report of a real run, and the page's structure without a browser."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import cerebro_hydra
from cerebro_hydra import cli
from cerebro_hydra.observe import RunEnded
from cerebro_hydra.observe.report import REPORT_FILE, ReportWriter, _reasons, is_running, render
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.digest import encode_document
from cerebro_hydra.tune import SearchResult
from cerebro_hydra.tune.running import run_claim
from tests.journals import cut_journal, rewrite_journal
from tests.observe.hostile import HOSTILE
from tests.processes import run_python

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """Elements with their attributes, and the text of cells, scripts and tracebacks."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._inside.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside[-1]][-1] += data

    @property
    def data(self) -> dict:
        return json.loads(self.texts["script"][0])


@pytest.fixture(scope="module")
def page(result: SearchResult) -> Page:
    return Page(Path(result.run_path, REPORT_FILE).read_text(encoding="utf-8"))


@pytest.fixture
def copy(result: SearchResult, tmp_path: Path) -> RunFolder:
    """A run's folder that a test may change."""
    shutil.copytree(result.run_path, tmp_path / "runs" / "copy")
    return RunFolder.open(str(tmp_path / "runs" / "copy"))


def test_the_search_left_the_page_that_the_folder_alone_gives(
    result: SearchResult, folder: RunFolder
) -> None:
    assert Path(result.run_path, REPORT_FILE).read_text(encoding="utf-8") == render(folder)


def test_every_trial_has_a_row_and_tracebacks_are_folded(page: Page, result: SearchResult) -> None:
    rows = [
        each["data-trial"] for tag, each in page.elements if tag == "tr" and "data-trial" in each
    ]
    assert sorted(rows) == [f"trial-{n:03d}" for n in range(4)]
    assert rows[0] == result.best_trial.trial_id
    raised, refused = page.texts["pre"]
    assert "this loss has had enough" in raised
    assert HOSTILE in refused


def test_hostile_text_stays_text(page: Page) -> None:
    assert not [tag for tag, _ in page.elements if tag == "b"]
    assert page.texts["td"].count(HOSTILE) == 4
    assert len(page.texts["script"]) == 2


def test_the_page_asks_for_nothing(result: SearchResult) -> None:
    content = Path(result.run_path, REPORT_FILE).read_text(encoding="utf-8")
    links = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url\(([^)]*)\)|@import""", content)
    inside = {"data:,", "#hatch", "#lanes", "#why-0", "#why-1"}
    assert {link for pair in links for link in pair if link} == inside
    assert "connect-src" not in content


def test_what_is_drawn_is_what_happened(page: Page, result: SearchResult) -> None:
    histories = [result.trials[n].history for n in range(len(page.data["trials"]))]
    assert [trial["history"] for trial in page.data["trials"]] == histories
    counted = [t for t in page.data["tasks"] if (t["kind"], t["outcome"]) == ("train", "done")]
    logs = [(t["trial"], t["epoch"], t["partition"]) for t in counted]
    expected = [(n, *v) for n, t in enumerate(result.trials) for v in t.visit_log]
    assert sorted(logs) == sorted(expected)
    assert [absence["worker"] for absence in page.data["absences"]] == [1]
    assert "failed" in {task["outcome"] for task in page.data["tasks"]}
    for task in page.data["tasks"]:
        assert 0 <= task["assigned"] <= task["start"] <= task["end"] <= page.data["seconds"]


def test_a_run_that_did_not_end_has_a_report_too(copy: RunFolder) -> None:
    """As after a killed driver: the begin of the journal, some tasks that never ended."""
    cut_journal(copy, lambda lines: max(n for n in range(30) if "StartSubEpoch" in str(lines[n])))
    ReportWriter(copy).on_record(RunEnded(1.0))
    cut = Page(Path(copy.path, REPORT_FILE).read_text(encoding="utf-8"))
    assert any("was interrupted" in text for text in cut.texts["strong"])
    assert "running" in {task["outcome"] for task in cut.data["tasks"]}
    assert "interrupted" in cut.texts["td"]
    assert not {"waiting", "training", "evaluating"} & set(cut.texts["td"])


def test_a_run_that_goes_on_says_so(copy: RunFolder) -> None:
    """Only the page that is served asks for a newer one; a file has nobody to ask."""
    cut_journal(copy, lambda lines: next(n for n, x in enumerate(lines) if "EndEpoch" in str(x)))
    assert not is_running(copy)
    with run_claim(copy):
        assert is_running(copy)
        page = Page(render(copy, running=True))
    assert any("the run goes on" in text for text in page.texts["strong"])
    assert page.data["running"]
    assert "interrupted" not in " ".join(page.texts["td"])
    assert "Best so far" in page.texts["h2"]


def test_data_and_models_are_told(page: Page, folder: RunFolder, result: SearchResult) -> None:
    spec = folder.read_trial(0, result.document.run_id)
    model = result.get_best_model().torch()
    assert spec.parameters == sum(each.numel() for each in model.parameters())
    told = [" ".join(text.split()) for text in page.texts["dd"]]
    assert "480 for training, 120 for validation" in told
    assert "features → label" in told
    assert f"{spec.parameters:,} parameters in {len(spec.shards)} shards" in told


def test_values_have_four_digits_and_all_of_them_on_hover(page: Page, result: SearchResult) -> None:
    best = result.best_trial.result_metrics["val_accuracy"]
    titles = {each["title"] for tag, each in page.elements if tag == "td" and "title" in each}
    assert str(best) in titles
    assert f"{best:.4g}" in page.texts["td"]


def test_the_same_reason_is_told_once() -> None:
    row = {"status": "failed", "error": "boom", "uncut_because": "", "recut": ""}
    rows = [{**row, "id": "a"}, {**row, "id": "b", "error": ""}, {**row, "id": "c"}]
    (reason,) = _reasons(rows)
    assert reason["ids"] == ["a", "c"]
    assert [each.get("reason") for each in rows] == [0, None, 0]


def test_nan_and_broken_unicode_are_shown(copy: RunFolder, result: SearchResult) -> None:
    spec = copy.read_trial(0, result.document.run_id)
    spec = replace(spec, params={**spec.params, "note": "\ud800"})
    document = encode_document({"run_id": result.document.run_id, "spec": spec.to_json()})
    copy.store.write(f"{copy.path}/trials/trial-000/trial.json", document)

    def diverge(told: dict[str, Any]) -> None:
        if told["type"] == "EndEpoch" and told["trial"] == 0:
            told["metrics"]["val_loss"] = float("nan")

    rewrite_journal(copy, diverge)
    page = Page(render(copy))
    assert page.data["trials"][0]["history"]["val_loss"] == ["nan"] * 3
    assert "nan" in page.texts["td"]


def test_report_and_trace_by_the_command_line(
    result: SearchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    arguments = ["report", result.run_path, "--output", str(page), "--trace", str(trace)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [str(page), str(trace)]
    assert page.read_text() == Path(result.run_path, REPORT_FILE).read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_report_by_the_command_line_goes_into_the_run(
    result: SearchResult, copy: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Path(copy.path, REPORT_FILE)
    report.unlink()
    assert cli.main(["report", copy.path]) == 0
    assert capsys.readouterr().out.strip() == str(report)
    assert report.read_text() == Path(result.run_path, REPORT_FILE).read_text()


def test_a_run_to_which_no_worker_came_says_so(copy: RunFolder) -> None:
    copy.store.delete(f"{copy.path}/journal")
    page = render(copy)
    assert "no worker came" in page and "1970" not in page


def test_the_page_is_found_where_spark_ships_the_package_as_a_zip(tmp_path: Path) -> None:
    package = Path(cerebro_hydra.__file__).parent
    shutil.make_archive(str(tmp_path / "shipped"), "zip", package.parent, package.name)
    program = (
        "import cerebro_hydra.observe.report as report\n"
        "assert 'shipped.zip' in report.__file__\n"
        "assert 'run report' in report.page().environment.loader.get_source("
        "report.page().environment, 'page.html.j2')[0]\n"
    )
    run_python("-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path / "shipped.zip"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["{tmp}"], "is not a run"), (["{run}", "--output", "{tmp}/no/a.html"], "give another path")],
)
def test_report_that_can_not_be_is_an_error(
    arguments: list[str],
    said: str,
    result: SearchResult,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [each.format(tmp=tmp_path, run=result.run_path) for each in arguments]
    assert cli.main(["report", *given]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--output", "--trace"])
def test_an_empty_path_is_refused_before_a_report_is_written(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "a-run", option, ""])
    assert ended.value.code == 2
    assert f"argument {option}: it is empty; give a file's path" in capsys.readouterr().err
