"""Who goes where: the coordinator, a thin shell around plan/; only it writes the journal."""
