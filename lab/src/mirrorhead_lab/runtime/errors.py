"""Errors that a user can correct, one class for each kind that callers treat differently."""

from __future__ import annotations

import os


class UserError(Exception):
    """The command line prints it as one line, without a traceback, and exits with code 2."""


class DataError(UserError):
    """A data set is missing, incomplete or damaged; the message says what to do."""


class RunError(UserError, ValueError):
    """A folder or file is not the run, sweep or result it should be, or it is damaged."""


class Diverged(UserError):
    """The loss or a gradient is no longer finite."""


class SweepError(UserError):
    """Some runs of a sweep failed; the results of all others are kept."""


def told(error: BaseException) -> str:
    """Return an error as one reads it: without the number of a system error, or a class of ours.

    >>> told(FileNotFoundError(2, "No such file or directory", "a.csv"))
    'a.csv: No such file or directory'
    >>> told(DataError("imdb is missing")), told(KeyError("x"))
    ('imdb is missing', "KeyError: 'x'")
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def reason(error: Exception) -> str:
    """Return why a file that the message names already could not be read.

    >>> reason(IsADirectoryError(21, "Is a directory", "a.csv"))
    'Is a directory'
    """
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start:,})"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
