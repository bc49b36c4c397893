"""Lists written as one string."""


def spaced(text: str) -> list[str]:
    """The words of ``text``."""
    return text.split()


def options(text: str) -> list[str]:
    """The parts of ``text`` between bars."""
    return text.split("|")
