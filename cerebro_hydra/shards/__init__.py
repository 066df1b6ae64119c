"""WHAT MOVES: a model's cut, its flat state, and the engine that runs shard tasks."""
