"""Mirror descent for attention, and certificates for what it selects."""

from mirrorhead.optim import MirrorAdam as MirrorAdam
from mirrorhead.optim import MirrorDescent as MirrorDescent
from mirrorhead.optim import attention_param_groups as attention_param_groups
from mirrorhead.potential import PNorm as PNorm

__version__ = "0.1.0"
