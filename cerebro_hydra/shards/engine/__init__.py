"""Lays out the state of shards in flat segments, and trains and evaluates them."""
