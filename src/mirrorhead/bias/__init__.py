"""Which margin an optimizer maximises: training on exact gradients, and certified shares."""

from mirrorhead.bias.follow import OptimizerPath as OptimizerPath
from mirrorhead.bias.follow import follow as follow
from mirrorhead.bias.linear import LinearProblem as LinearProblem
from mirrorhead.bias.profile import MarginProfile as MarginProfile
from mirrorhead.bias.profile import margin_profile as margin_profile
