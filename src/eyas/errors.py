"""Errors a user can act on: one clear sentence each, never a traceback."""

from collections.abc import Iterable


class EyasError(Exception):
    """A job failed. The message names the file, what was found, what was expected, what to do."""

    exit_code = 1


class UsageError(EyasError):
    """Wrong use or bad input."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """What another library's error says in one line, or its kind where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]


def listing(names: Iterable[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
