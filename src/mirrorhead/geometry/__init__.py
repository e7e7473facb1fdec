"""Geometries: norms and potentials, a class each."""

from mirrorhead.geometry._base import Norm as Norm
from mirrorhead.geometry._base import Potential as Potential
from mirrorhead.geometry._base import Separable as Separable
from mirrorhead.geometry._choice import as_norm as as_norm
from mirrorhead.geometry._choice import as_potential as as_potential
from mirrorhead.geometry.centered import Centered as Centered
from mirrorhead.geometry.grouped import Grouped as Grouped
from mirrorhead.geometry.hyperbolic_entropy import HyperbolicEntropy as HyperbolicEntropy
from mirrorhead.geometry.k_support import KSupport as KSupport
from mirrorhead.geometry.knee import Knee as Knee
from mirrorhead.geometry.pnorm import PNorm as PNorm
from mirrorhead.geometry.schatten import Schatten as Schatten
from mirrorhead.geometry.soft_threshold import SoftThreshold as SoftThreshold
