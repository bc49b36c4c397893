"""Fixtures of the tests of legacy entries."""

from tests.cache.legacy.prompt_files import saved

__all__ = ["saved"]
