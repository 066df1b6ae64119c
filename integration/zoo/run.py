"""Measures the architectures of the zoo and writes what came of each into results.json.

python -m integration.zoo.run                           all of them, in both ways
python -m integration.zoo.run --missing --ways modules  what results.json lacks, in one way
python -m integration.zoo.run llama mixtral             those of these names
"""

from __future__ import annotations

import argparse
import sys
import warnings

from integration.zoo import import_torchvision  # noqa: F401, before transformers and timm
from integration.zoo.catalogue import ARCHITECTURES
from integration.zoo.measure import WAYS, Measured, measure
from integration.zoo.of_rare_events import EVENTS, is_found
from integration.zoo.of_refusals import REFUSALS, refusal
from integration.zoo.results import read_results, write_results


def main(arguments: argparse.Namespace) -> int:
    """Measure what the arguments name; return 1 if training differs anywhere after all."""
    warnings.filterwarnings("ignore")
    results = {(r.library, r.name): r for r in read_results()}
    keys = [(each.library, each.name) for each in ARCHITECTURES]
    for key, architecture in zip(keys, ARCHITECTURES, strict=True):
        before = results.get(key)
        if arguments.names and architecture.name not in arguments.names:
            continue
        if arguments.missing and before and all(before.cut(way) for way in arguments.ways):
            continue
        measured = measure(architecture, arguments.ways)
        print(_line(measured), flush=True)
        results[key] = measured.with_ways_of(before)
        write_results([results[key] for key in keys if key in results])
    every = [results[key] for key in keys if key in results]
    as_asked = sum(all(c.as_asked for c in r.cuts if c.way == "modules") for r in every)
    exact = all(c.differs is None for r in every for c in r.cuts)
    print(f"{as_asked} of {len(every)} architectures are cut by modules into the shards asked for")
    found = all(is_found(measure(event, ["modules"]), by) for event, by in EVENTS)
    print(f"rare events are {'found' if found else 'NOT FOUND'} in every cut")
    refused = all(by in refusal(each) for each, by in REFUSALS)
    print(f"what must be refused {'is, in its words' if refused else 'IS NOT'}")
    return 0 if exact and found and refused else 1


def _line(measured: Measured) -> str:
    cuts = ", ".join(
        f"{c.asked} by {c.way}: {c.got} by {c.mode}"
        + (f" DIFFERS: {c.differs}" if c.differs else "")
        for c in measured.cuts
    )
    return f"{measured.library} {measured.name} ({measured.seconds} s): {cuts}"


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of architectures; all, if none is given")
    parser.add_argument("--missing", action="store_true", help="what results.json lacks alone")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_parsed()))
