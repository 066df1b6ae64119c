"""Who trains: the process in a worker, a thin shell around data, wire and shards."""
