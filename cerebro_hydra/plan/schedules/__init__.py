"""Schedules are pure functions from a window's shape to a list of actions."""
