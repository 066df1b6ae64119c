"""Holds the spaces of hyper-parameters, and the searchers: what is tried next."""
