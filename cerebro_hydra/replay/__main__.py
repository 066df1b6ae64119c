"""Replays a trial for another process, which asks on standard input; see `replay.child`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from cerebro_hydra.errors import CerebroHydraError
from cerebro_hydra.recipe.determinism import compute_as
from cerebro_hydra.replay.replay_trial import replay_here


def main() -> None:
    """Replay what standard input asks for, and print the verdict as one line of JSON."""
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    compute_as(asked["numerics"])
    try:
        answer = asdict(replay_here(asked["run"], asked["trial"], asked["factory"]))
    except CerebroHydraError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
