"""The decisions of a run, as pure Python: no torch, no clock, no thread, no socket, no file."""
