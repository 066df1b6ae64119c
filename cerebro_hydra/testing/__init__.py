"""Conformance suites and stand-ins that other implementations can inherit."""
