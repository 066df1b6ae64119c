"""Saves a trained model as a graph that loads without its source."""
