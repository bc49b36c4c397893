"""Benchmarks: each prints ratios of two sides measured in turn, never a time to be believed alone."""
