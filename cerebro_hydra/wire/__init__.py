"""Carries shards over Arrow Flight and control as lines of JSON, both with TLS on request."""
