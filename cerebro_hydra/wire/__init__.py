"""Carries shards and control between processes that know a secret, with TLS on request."""
