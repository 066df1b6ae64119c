"""WHO GOES WHERE: the coordinator, a thin shell around plan/, and the only writer of the journal."""
