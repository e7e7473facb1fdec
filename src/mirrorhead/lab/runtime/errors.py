"""Errors that a user can put right."""

from __future__ import annotations


class UserError(Exception):
    """Printed as one line, without a traceback; the exit code is 2."""
