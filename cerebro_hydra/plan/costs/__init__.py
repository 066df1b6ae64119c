"""Holds what tasks, hops and moves cost, in seconds and bytes."""
