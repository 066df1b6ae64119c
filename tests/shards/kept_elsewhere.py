"""Keeps a number for the trials of a test in another module."""

gain = 1.0
