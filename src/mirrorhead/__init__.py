"""Mirror-descent optimizers, certified max-margin solvers for attention, and patches."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mirrorhead._version import __version__ as __version__

if TYPE_CHECKING:
    from mirrorhead.bias import LinearProblem as LinearProblem
    from mirrorhead.bias import MarginProfile as MarginProfile
    from mirrorhead.bias import OptimizerPath as OptimizerPath
    from mirrorhead.bias import follow as follow
    from mirrorhead.bias import margin_profile as margin_profile
    from mirrorhead.choosing import GeometryChoice as GeometryChoice
    from mirrorhead.choosing import choose_geometry as choose_geometry
    from mirrorhead.geometry import Centered as Centered
    from mirrorhead.geometry import Grouped as Grouped
    from mirrorhead.geometry import HyperbolicEntropy as HyperbolicEntropy
    from mirrorhead.geometry import Knee as Knee
    from mirrorhead.geometry import KSupport as KSupport
    from mirrorhead.geometry import Norm as Norm
    from mirrorhead.geometry import PNorm as PNorm
    from mirrorhead.geometry import Potential as Potential
    from mirrorhead.geometry import Schatten as Schatten
    from mirrorhead.geometry import SoftThreshold as SoftThreshold
    from mirrorhead.losses import Loss as Loss
    from mirrorhead.margin import Check as Check
    from mirrorhead.margin import MarginSolution as MarginSolution
    from mirrorhead.margin import attention_svm as attention_svm
    from mirrorhead.margin import multiclass_svm as multiclass_svm
    from mirrorhead.margin import svm as svm
    from mirrorhead.optim import CenteredAdam as CenteredAdam
    from mirrorhead.optim import MirrorAdam as MirrorAdam
    from mirrorhead.optim import MirrorDescent as MirrorDescent
    from mirrorhead.optim import ParamGroups as ParamGroups
    from mirrorhead.optim import SteepestDescent as SteepestDescent
    from mirrorhead.optim import attention_param_groups as attention_param_groups
    from mirrorhead.optim import matrix_param_groups as matrix_param_groups
    from mirrorhead.patches import Patch as Patch
    from mirrorhead.patches import PatchError as PatchError
    from mirrorhead.patches import WeightReceiver as WeightReceiver
    from mirrorhead.patches import WeightSync as WeightSync
    from mirrorhead.paths import Diagnostics as Diagnostics
    from mirrorhead.paths import Path as Path
    from mirrorhead.paths import RegularizationPath as RegularizationPath
    from mirrorhead.paths import assumption_b as assumption_b
    from mirrorhead.paths import descend as descend
    from mirrorhead.paths import diagnose as diagnose
    from mirrorhead.paths import joint_regularization_path as joint_regularization_path
    from mirrorhead.paths import largest_step as largest_step
    from mirrorhead.paths import regularization_path as regularization_path
    from mirrorhead.problem import AttentionProblem as AttentionProblem
    from mirrorhead.problem import Gradient as Gradient
    from mirrorhead.sparsity import DensitySchedule as DensitySchedule
    from mirrorhead.sparsity import SparsityReport as SparsityReport
    from mirrorhead.sparsity import anneal as anneal
    from mirrorhead.sparsity import sparsity_report as sparsity_report
    from mirrorhead.tokens import ConeConstants as ConeConstants
    from mirrorhead.tokens import LocalOptimality as LocalOptimality
    from mirrorhead.tokens import cone_constants as cone_constants
    from mirrorhead.tokens import globally_optimal_tokens as globally_optimal_tokens
    from mirrorhead.tokens import locally_optimal as locally_optimal
    from mirrorhead.tokens import locally_optimal_sets as locally_optimal_sets
    from mirrorhead.tokens import support_tokens as support_tokens
    from mirrorhead.tokens import token_scores as token_scores

# The same names again, for the interpreter. A name is imported when it is first used, because
# torch takes a second to import. A test compares the two lists.
_NAMES = {
    "bias": "LinearProblem MarginProfile OptimizerPath follow margin_profile",
    "choosing": "GeometryChoice choose_geometry",
    "problem": "AttentionProblem Gradient",
    "losses": "Loss",
    "margin": "Check MarginSolution attention_svm multiclass_svm svm",
    "native": "",
    "optim": "CenteredAdam MirrorAdam MirrorDescent ParamGroups SteepestDescent"
    " attention_param_groups matrix_param_groups",
    "patches": "Patch PatchError WeightReceiver WeightSync",
    "paths": "Diagnostics Path RegularizationPath assumption_b descend diagnose"
    " joint_regularization_path largest_step regularization_path",
    "geometry": "Centered Grouped HyperbolicEntropy KSupport Knee Norm PNorm Potential Schatten"
    " SoftThreshold",
    "sparsity": "DensitySchedule SparsityReport anneal sparsity_report",
    "tokens": "ConeConstants LocalOptimality cone_constants globally_optimal_tokens"
    " locally_optimal locally_optimal_sets support_tokens token_scores",
    "theory": "",
}
_HOMES = {home: names.split() for home, names in _NAMES.items()}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_HOME})
