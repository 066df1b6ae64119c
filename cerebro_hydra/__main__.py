"""Runs the command line as `python -m cerebro_hydra`."""

from __future__ import annotations

import sys

from cerebro_hydra.cli import main

if __name__ == "__main__":
    sys.exit(main())
