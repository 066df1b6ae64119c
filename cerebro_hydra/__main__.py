"""Runs the command line as `python -m cerebro_hydra`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The current folder, which `-m` puts before all others: it may be a run's.
        del sys.path[0]
    from cerebro_hydra.cli import main

    sys.exit(main())
