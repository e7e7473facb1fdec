"""Mirror descent for attention, and certificates for what it selects."""

from mirrorhead.attention import AttentionProblem as AttentionProblem
from mirrorhead.margin import MarginSolution as MarginSolution
from mirrorhead.margin import attention_svm as attention_svm
from mirrorhead.margin import svm as svm
from mirrorhead.optim import MirrorAdam as MirrorAdam
from mirrorhead.optim import MirrorDescent as MirrorDescent
from mirrorhead.optim import attention_param_groups as attention_param_groups
from mirrorhead.paths import Path as Path
from mirrorhead.paths import descend as descend
from mirrorhead.paths import largest_step as largest_step
from mirrorhead.potential import PNorm as PNorm
from mirrorhead.tokens import cone_constants as cone_constants
from mirrorhead.tokens import globally_optimal_tokens as globally_optimal_tokens
from mirrorhead.tokens import locally_optimal as locally_optimal
from mirrorhead.tokens import locally_optimal_sets as locally_optimal_sets
from mirrorhead.tokens import support_tokens as support_tokens
from mirrorhead.tokens import token_scores as token_scores

__version__ = "0.1.0"
