"""Runs the command line: `demo`, `resume`, `replay`, `plan`, `report`, `watch` and others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from cerebro_hydra import __version__
from cerebro_hydra.errors import CerebroHydraError, StoreError
from cerebro_hydra.foreign_text import visible
from cerebro_hydra.kernels import KERNELS

if TYPE_CHECKING:
    from cerebro_hydra.storage.run_document import RunDocument

_WIDEST = 10_000  # characters of a line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0 for success, 1 for failure, 2 for wrong use."""
    arguments = _parser().parse_args(argv)
    # Heavy imports are in the commands, so that --help and mistakes answer at once.
    try:
        status: int = arguments.command(arguments)
    except CerebroHydraError as error:
        notes: list[str] = getattr(error, "__notes__", [])
        print(visible("\n".join([f"cerebro-hydra: {error}", *notes])), file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"cerebro-hydra: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cerebro-hydra",
        description="Trains many PyTorch models over a Spark DataFrame: rows stay, shards hop.",
    )
    parser.add_argument("--version", action="version", version=f"cerebro-hydra {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train eight models, then replay every one of them")
    demo.add_argument("--epochs", type=_count, default=5, help="default: 5")
    demo.add_argument("--workers", type=_count, default=2, help="default: 2")
    demo.add_argument("--keep", metavar="PATH", help="store to keep; default: a removed folder")
    demo.set_defaults(command=_demo)

    resume = commands.add_parser("resume", help="go on with a run whose driver ended")
    resume.add_argument("run", metavar="RUN", help="a run's folder: <store>/runs/<run id>")
    _add_factory(resume)
    _add_spark(resume)
    workers = "default: one for each partition of the run's data"
    resume.add_argument("--workers", type=_count, help=workers)
    resume.set_defaults(command=_resume)

    replay = commands.add_parser(
        "replay", help="train trials again in plain PyTorch and compare every bit"
    )
    replay.add_argument("run", metavar="RUN", help="a run's folder: <store>/runs/<run id>")
    replay.add_argument("--trial", metavar="ID", help="for example trial-000; default: all")
    _add_factory(replay)
    replay.set_defaults(command=_replay)

    verify = commands.add_parser(
        "verify", help="read every file of a run and its data, or of a store, and check its digest"
    )
    verify.add_argument(
        "path", metavar="PATH", help="a run's folder: <store>/runs/<run id>, or a store's"
    )
    verify.set_defaults(command=_verify)

    doctor = commands.add_parser("doctor", help="check a Spark and its network; say what to change")
    _add_spark(doctor)
    doctor.add_argument("--workers", type=_count, default=2, help="default: 2")
    doctor.add_argument(
        "--store", metavar="PATH", help="a folder that all machines share, or hdfs://..."
    )
    doctor.add_argument(
        "--import",
        metavar="MODULE",
        dest="modules",
        action="append",
        default=[],
        help="a module that agents need, such as that of your factory; may come several times",
    )
    doctor.add_argument(
        "--devices", type=_count, metavar="N", help="devices_per_worker, as a backend shall have it"
    )
    doctor.add_argument(
        "--numerics", choices=tuple(KERNELS), default="fast", help="as a backend shall have it"
    )
    doctor.set_defaults(command=_doctor)

    report = commands.add_parser("report", help="write a run's report.html from its folder")
    report.add_argument("run", metavar="RUN", help="a run's folder: <store>/runs/<run id>")
    report.add_argument("--output", type=_file, metavar="PATH", help="default: report.html in RUN")
    report.add_argument(
        "--trace", type=_file, metavar="PATH", help="write a trace for Perfetto or Chrome, too"
    )
    report.set_defaults(command=_report)

    plan = commands.add_parser(
        "plan", help="say what the trials of a run would take on other workers, without Spark"
    )
    plan.add_argument(
        "--from",
        dest="run",
        metavar="RUN",
        required=True,
        help="a run's folder, <store>/runs/<run id>, whose events say what tasks cost",
    )
    counts = "one or several, as in 2,8,32; default: those of the run"
    plan.add_argument("--workers", metavar="N", type=_counts, help=counts)
    plan.add_argument("--devices", metavar="N", type=_counts, help=f"of a worker; {counts}")
    plan.add_argument("--device-memory", metavar="SIZE", help="such as 2GiB; default: the run's")
    plan.add_argument("--price-per-hour", metavar="PRICE", type=float, help="of a worker")
    plan.add_argument(
        "--report", type=_file, metavar="PATH", help="write the first row's timeline as a page"
    )
    plan.set_defaults(command=_plan)

    watch = commands.add_parser("watch", help="show a run's report in a browser while it goes on")
    watch.add_argument("run", metavar="RUN", help="a run's folder: <store>/runs/<run id>")
    watch.add_argument("--port", type=_port, default=0, help="of this machine; default: a free one")
    watch.set_defaults(command=_watch)

    runs = commands.add_parser("runs", help="list the runs and the data of a store")
    runs.add_argument("store", metavar="STORE", help="the folder of a store")
    runs.set_defaults(command=_runs)

    clean = commands.add_parser(
        "clean", help="delete runs and data, never what a run that stays needs"
    )
    clean.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="<store>/runs/<run id>, <store>/data/<name>, or a store: all data that no run needs",
    )
    clean.add_argument("--yes", action="store_true", help="delete without asking")
    clean.set_defaults(command=_clean)
    return parser


def _add_factory(parser: argparse.ArgumentParser) -> None:
    factory = parser.add_mutually_exclusive_group()
    factory.add_argument("--factory", metavar="MODULE:NAME", help="the run's estimator_gen_fn")
    factory.add_argument(
        "--trust", action="store_true", help="import the estimator_gen_fn that the run records"
    )


def _add_spark(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--master", metavar="URL", help="default: Spark on this machine")
    parser.add_argument(
        "--conf",
        metavar="KEY=VALUE",
        type=_setting,
        action="append",
        default=[],
        help="a Spark setting; may come several times",
    )


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _port(text: str) -> int:
    number = int(text)
    if number not in range(1 << 16):
        raise argparse.ArgumentTypeError(f"{number} is not between 0 and 65535")
    return number


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form spark.NAME=VALUE")
    return name, value


def _file(path: str) -> str:
    if not path:
        raise argparse.ArgumentTypeError("it is empty; give a file's path")
    return path


def _demo(arguments: argparse.Namespace) -> int:
    from cerebro_hydra.demo import run

    return run(epochs=arguments.epochs, workers=arguments.workers, keep=arguments.keep)


def _resume(arguments: argparse.Namespace) -> int:
    from cerebro_hydra.spark import SparkBackend
    from cerebro_hydra.spark.session import new_session
    from cerebro_hydra.storage import RunFolder
    from cerebro_hydra.tune.resume import RunToResume
    from cerebro_hydra.tune.running import Surroundings, interruptible

    run = RunToResume(RunFolder.open(arguments.run))
    with _factory_folder(arguments, run.document):
        factory = run.find_factory(arguments.factory, arguments.trust)
        workers = arguments.workers or run.document.num_partitions
        spark = new_session(arguments.master, dict(arguments.conf), workers)
        try:
            with interruptible():
                backend = SparkBackend(
                    spark,
                    workers,
                    numerics=run.document.numerics,
                    threads_per_worker=run.document.threads,
                )
                print(run.go_on(Surroundings(backend, factory)))
        finally:
            spark.stop()
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from cerebro_hydra.storage import RunFolder
    from cerebro_hydra.storage.run_folder import read_document
    from cerebro_hydra.tune.result import print_replays

    with _factory_folder(arguments, read_document(RunFolder.open(arguments.run))):
        identical = print_replays(
            Console(),
            arguments.run,
            trial_id=arguments.trial,
            factory=arguments.factory,
            trust=arguments.trust,
        )
    return 0 if identical else 1


def _factory_folder(
    arguments: argparse.Namespace, document: RunDocument
) -> AbstractContextManager[None]:
    """Let the factory that was named or is trusted lie in the current folder.

    That may be the run's own, so that nothing else is taken from there.
    """
    name = document.factory if arguments.trust else arguments.factory
    if name is None:
        return nullcontext()
    from cerebro_hydra.storage.estimator_factories import parts_of
    from cerebro_hydra.worker_imports import importing_from_current_folder

    return importing_from_current_folder(parts_of(name)[0])


def _verify(arguments: argparse.Namespace) -> int:
    from cerebro_hydra.verification import verify

    report = verify(arguments.path, on_part=lambda part: print(visible(str(part)), flush=True))
    print(visible(report.summary))
    return 0 if report.ok else 1


def _doctor(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from cerebro_hydra.spark.preflight import doctor_of_new_session

    report = doctor_of_new_session(
        arguments.master,
        dict(arguments.conf),
        arguments.workers,
        arguments.store,
        arguments.modules,
        arguments.devices,
        arguments.numerics,
    )
    Console().print(report)
    return 0 if report.ok else 1


def _report(arguments: argparse.Namespace) -> int:
    import json

    from cerebro_hydra.observe.report import REPORT_FILE, is_running, render
    from cerebro_hydra.observe.timeline import trace
    from cerebro_hydra.storage import RunFolder

    folder = RunFolder.open(arguments.run)
    page = render(folder, is_running(folder), importance=True)
    if arguments.output:
        _write(arguments.output, page)
    else:
        print(folder.write_file(REPORT_FILE, page.encode()))
    if arguments.trace:
        _write(arguments.trace, json.dumps(trace(folder)))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from cerebro_hydra.planning.biller import earlier_run_at
    from cerebro_hydra.planning.plan import Question, plan_again

    run = earlier_run_at(arguments.run)
    asked = (arguments.workers, arguments.devices, arguments.device_memory)
    question = Question.checked(run.resources, run.workers, *asked, arguments.price_per_hour)
    found = plan_again(run, question)
    print(visible(str(found)))
    if arguments.report:
        _write(arguments.report, found.page())
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from cerebro_hydra.observe.watch import watch
    from cerebro_hydra.storage import RunFolder

    watch(RunFolder.open(arguments.run), arguments.port, partial(print, flush=True))
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from cerebro_hydra.tune.store import print_contents

    # A pipe or file has no width of its own, and what reads it wants whole words and lines.
    print_contents(Console(width=None if sys.stdout.isatty() else _WIDEST), arguments.store)
    return 0


def _clean(arguments: argparse.Namespace) -> int:
    from cerebro_hydra.tune.store import clean

    def confirmed(question: str) -> bool:
        if arguments.yes:
            return True
        try:
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:  # nobody is there to answer
            return False

    return 0 if clean(arguments.paths, print, confirmed) else 1


def _write(path: str, content: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise StoreError(f"can't write {path!r}: {error.strerror}; give another path") from error
    print(path)
