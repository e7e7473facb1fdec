"""Optimizers: a direction, and the geometry in which to step along it."""

from mirrorhead.optim.mirror_adam import MirrorAdam as MirrorAdam
from mirrorhead.optim.mirror_adam import mirror_adam as mirror_adam
from mirrorhead.optim.mirror_descent import MirrorDescent as MirrorDescent
from mirrorhead.optim.mirror_descent import mirror_descent as mirror_descent
from mirrorhead.optim.param_groups import ParamGroups as ParamGroups
from mirrorhead.optim.param_groups import attention_param_groups as attention_param_groups
from mirrorhead.optim.param_groups import matrix_param_groups as matrix_param_groups
from mirrorhead.optim.steepest_descent import SteepestDescent as SteepestDescent
