"""How it travels: shard transfer and control over Arrow Flight, tensors and JSON only."""
