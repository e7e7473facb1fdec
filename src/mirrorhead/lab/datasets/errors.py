"""What goes wrong with data, by name, so that a caller can tell it from a mistake in code."""

from __future__ import annotations


class DataError(Exception):
    """Data that is missing, cut short, or not what it should be; the message says what to do."""
