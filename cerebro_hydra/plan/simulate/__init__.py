"""Drives the deciding state machines with a virtual clock."""
