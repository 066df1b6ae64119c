"""Decides what the devices of a worker do, as a state machine: queues, memory, what is logged."""
