"""Partitions of rows: Spark prepares them, petastorm or Arrow reads them, memory maps cache them.

Importing this package imports neither pyspark nor petastorm nor torch.
"""

from __future__ import annotations
