"""Proposes which open tasks begin, from a narrow view of the state of a run."""
