"""Soaks: what the test suite checks in seconds, run for as long as one likes, with a seed to repeat it."""
