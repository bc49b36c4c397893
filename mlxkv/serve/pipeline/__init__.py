"""From a choice's tokens to the parts of its answer: reasoning, text, and calls of tools. One for all routes."""

from .pipeline import Pipeline

__all__ = ["Pipeline"]
