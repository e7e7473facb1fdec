"""Errors that a user can correct, one class for each kind that callers treat differently."""

from __future__ import annotations


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
