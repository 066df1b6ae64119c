"""Lets the tests import what lies beside them, and Spark's workers too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
