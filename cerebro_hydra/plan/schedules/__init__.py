"""Schedules: each one a small pure function from a window's shape to a list of actions."""
