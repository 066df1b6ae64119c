"""Sizes a trial before it runs: where it is cut, and what it needs of a worker."""
