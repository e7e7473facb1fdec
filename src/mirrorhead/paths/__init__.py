"""Descent paths, regularization paths, and what can be read off them."""

from mirrorhead.paths.descent import Path as Path
from mirrorhead.paths.descent import descend as descend
from mirrorhead.paths.diagnostics import Diagnostics as Diagnostics
from mirrorhead.paths.diagnostics import diagnose as diagnose
from mirrorhead.paths.stepsize import largest_step as largest_step
