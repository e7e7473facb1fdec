"""Descent paths, regularization paths, and what can be read off them."""

from mirrorhead.paths._assumption_b import assumption_b as assumption_b
from mirrorhead.paths.descent import Path as Path
from mirrorhead.paths.descent import descend as descend
from mirrorhead.paths.diagnostics import Diagnostics as Diagnostics
from mirrorhead.paths.diagnostics import diagnose as diagnose
from mirrorhead.paths.regularization import RegularizationPath as RegularizationPath
from mirrorhead.paths.regularization import (
    joint_regularization_path as joint_regularization_path,
)
from mirrorhead.paths.regularization import regularization_path as regularization_path
from mirrorhead.paths.step_size import largest_step as largest_step
