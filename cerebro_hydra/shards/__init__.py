"""Cuts a model into shards, lays out its flat state, and runs shard tasks in an engine."""
