from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from cerebro_hydra.errors import ConfigurationError, ReplayError
from cerebro_hydra.storage import estimator_factories
from tests.processes import run_python

MODULE = """
def build(params):
    return params

class Models:
    @staticmethod
    def build(params):
        return params

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "factories_under_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "factories_under_test", raising=False)
    return "factories_under_test"


def test_function_of_a_module_is_found_again_by_its_name(module: str) -> None:
    for name in (f"{module}:build", f"{module}:Models.build"):
        factory = estimator_factories.import_factory(name)
        assert estimator_factories.name_of(factory) == name
        assert estimator_factories.find("/no/run", recorded=name, trust=True) is factory
        assert estimator_factories.find("/no/run", recorded=None, given=name) is factory


def test_lambdas_nested_and_partial_functions_have_no_name(module: str) -> None:
    def nested(params: object) -> object:
        return params

    build = estimator_factories.import_factory(f"{module}:build")
    assert estimator_factories.name_of(nested) is None
    assert estimator_factories.name_of(lambda params: params) is None
    assert estimator_factories.name_of(functools.partial(build)) is None


def test_function_that_its_name_no_longer_leads_to_has_no_name(module: str) -> None:
    @functools.wraps(estimator_factories.import_factory(f"{module}:build"))
    def wrapper(params: object) -> object:
        return params

    assert estimator_factories.name_of(wrapper) is None


def test_function_of_a_script_has_no_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from cerebro_hydra.storage.estimator_factories import name_of\n"
        "def build(params):\n    return params\n"
        "print(name_of(build))\n"
    )
    assert run_python(script).stdout.strip() == "None"


def test_given_wins_over_remembered_and_remembered_over_recorded(
    module: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    remembered, given = (lambda params: 1), (lambda params: 2)
    estimator_factories.remember(str(run), remembered)
    recorded = f"{module}:build"
    assert estimator_factories.find(str(run), recorded, given) is given
    imported = estimator_factories.import_factory(recorded)
    assert estimator_factories.find(str(run), recorded, recorded) is imported
    assert estimator_factories.find(f"{run}/../run/", recorded) is remembered
    assert estimator_factories.find(str(run), recorded, trust=True) is remembered
    assert estimator_factories.find(str(tmp_path), recorded, trust=True) is imported


def test_recorded_name_imports_nothing_before_it_is_confirmed(tmp_path: Path) -> None:
    (tmp_path / "evil_factory_of_a_file.py").write_text("raise SystemExit('it ran')\n")
    sys.path.insert(0, str(tmp_path))
    try:
        for recorded in ("evil_factory_of_a_file:build", "subprocess:call", "no form at all"):
            with pytest.raises(ConfigurationError, match=f"{recorded}.*--trust.*--factory"):
                estimator_factories.find(str(tmp_path), recorded)
        with pytest.raises(ReplayError, match="it ran"):
            estimator_factories.find(str(tmp_path), "evil_factory_of_a_file:build", trust=True)
    finally:
        sys.path.remove(str(tmp_path))


def test_run_on_a_remote_store_is_remembered_wherever_the_process_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def factory(params: object) -> object:
        return params

    estimator_factories.remember("hdfs://nn:8020/store/runs/r1", factory)
    monkeypatch.chdir(tmp_path)
    assert estimator_factories.find("hdfs://nn:8020/store/runs/r1/", None) is factory


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def build(", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_module_that_fails_is_told_with_the_name_of_the_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    (tmp_path / "failing_under_test.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = rf"'failing_under_test:build': the import of 'failing_under_test' failed \({said}"
    with pytest.raises(ReplayError, match=told):
        estimator_factories.import_factory("failing_under_test:build")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("build", "another form than module:name"),
        (":build", "another form than module:name"),
        (".relative:build", "another form than module:name"),
        ("factories_under_test:<locals>.build", "another form than module:name"),
        ("no_such_module_here:build", "can't import 'no_such_module_here'.*PYTHONPATH"),
        ("factories_under_test:bild", "has no function 'bild'"),
        ("factories_under_test:number", "has no function 'number'"),
    ],
)
def test_name_that_leads_nowhere_says_why(module: str, name: str, said: str) -> None:
    with pytest.raises(ReplayError, match=said):
        estimator_factories.import_factory(name)


def test_unknown_factory_says_how_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="--factory module:name"):
        estimator_factories.find(str(tmp_path), None)
