"""Lists written as one string, or as a file of lines in ``phrasings/``."""

from pathlib import Path


def lines(name: str) -> list[str]:
    """The lines of ``phrasings/NAME``: templates that were written one by one, by hand."""
    return (Path(__file__).parent / "phrasings" / name).read_text().splitlines()


def spaced(text: str) -> list[str]:
    """The words of ``text``."""
    return text.split()


def options(text: str) -> list[str]:
    """The parts of ``text`` between bars."""
    return text.split("|")
