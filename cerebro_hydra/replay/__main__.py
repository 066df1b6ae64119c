"""Replays a trial for another process, which asks on standard input; see `replay.child`.

Modules are imported after they are looked for where that process looks.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Replay what is asked for, and print the verdict as JSON; what others print goes to stderr."""
    verdict = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    verdict.write(json.dumps(_answer(asked)))
    verdict.close()


def _answer(asked: dict[str, str]) -> dict[str, object]:
    from dataclasses import asdict

    from cerebro_hydra.errors import CerebroHydraError, ReplayError
    from cerebro_hydra.recipe.randomness import compute_as
    from cerebro_hydra.replay.replay_trial import replay_here
    from cerebro_hydra.storage.estimator_factories import import_factory

    try:
        factory = import_factory(asked["factory"])
    except ReplayError:
        return {"importable": False}
    compute_as(asked["numerics"])
    try:
        return {"report": asdict(replay_here(asked["run"], asked["trial"], factory))}
    except CerebroHydraError as error:
        return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    main()
