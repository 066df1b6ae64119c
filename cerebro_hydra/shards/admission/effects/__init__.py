"""Finds what training and evaluation change or keep beside the state that hops."""
