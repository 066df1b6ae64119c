"""Partitions: prepared by Spark, read by petastorm or Arrow, cached in memory maps, cut in batches.

Importing this package imports neither pyspark nor petastorm nor torch.
"""

from __future__ import annotations
