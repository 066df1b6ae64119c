"""Sums the gradients of replicas, bit for bit as one process would."""
