"""Mirror descent for attention, and certificates for what it selects."""

from mirrorhead.potential import PNorm as PNorm

__version__ = "0.1.0"
