"""Optimizers: a direction, and the geometry in which to step along it."""

from mirrorhead.optim.centered_adam import CenteredAdam as CenteredAdam
from mirrorhead.optim.mirror_adam import MirrorAdam as MirrorAdam
from mirrorhead.optim.mirror_descent import MirrorDescent as MirrorDescent
from mirrorhead.optim.param_groups import ParamGroups as ParamGroups
from mirrorhead.optim.param_groups import attention_param_groups as attention_param_groups
from mirrorhead.optim.param_groups import matrix_param_groups as matrix_param_groups
from mirrorhead.optim.steepest_descent import SteepestDescent as SteepestDescent
