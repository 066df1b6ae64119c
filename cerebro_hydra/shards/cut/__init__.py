"""Cuts a model into shards, by its modules or by its exported graph."""
