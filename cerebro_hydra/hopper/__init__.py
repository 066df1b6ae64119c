"""Coordinates a run as a thin shell around plan/; only it writes the journal."""
