"""Compares a cut with the uncut model in every bit, and measures what its tasks cost."""
