"""How it travels: shards over Arrow Flight, control as lines of JSON, both with TLS on request."""
