"""Prepares partitions with Spark, reads them with petastorm or Arrow, caches them in memory maps.

Importing this package imports neither pyspark nor petastorm nor torch.
"""

from __future__ import annotations
