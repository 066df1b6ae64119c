"""Decides a run as a state machine: trials, attempts, states, and where they hop next."""
