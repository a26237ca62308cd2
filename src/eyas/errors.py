"""Errors a user can act on: one clear sentence each, never a traceback."""


class EyasError(Exception):
    """A job failed. The message names the file, what was found, what was expected, what to do."""

    exit_code = 1


class UsageError(EyasError):
    """Wrong use or bad input."""

    exit_code = 2
