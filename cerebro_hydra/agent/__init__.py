"""The agent, the process that trains in a worker: a thin shell around data, wire and shards."""
