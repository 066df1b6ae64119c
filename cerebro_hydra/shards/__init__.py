"""The shards of a model: its cut, its flat state, and the engine that runs shard tasks."""
