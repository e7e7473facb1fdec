"""Mirror descent for attention, and certificates for what it selects."""

from mirrorhead.margin import MarginSolution as MarginSolution
from mirrorhead.margin import attention_svm as attention_svm
from mirrorhead.margin import svm as svm
from mirrorhead.potential import PNorm as PNorm

__version__ = "0.1.0"
