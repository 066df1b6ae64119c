"""The coordinator of a run, a thin shell around plan/; only it writes the journal."""
