"""Makes the decisions of a run in pure Python: no torch, clock, thread, socket or file."""
