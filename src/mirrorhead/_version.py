"""The version, where reading it costs nothing."""

__version__ = "0.1.0"
