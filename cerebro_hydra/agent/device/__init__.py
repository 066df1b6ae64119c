"""A device that carries out shard tasks: its messages, its process, its visits."""
