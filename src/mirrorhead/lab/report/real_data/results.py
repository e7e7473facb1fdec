"""The report's names for the classes of `mirrorhead.lab.evaluation.results`."""

from mirrorhead.lab.evaluation.results import DATA_SETS as STUDIES
from mirrorhead.lab.evaluation.results import KINDS as KINDS
from mirrorhead.lab.evaluation.results import SHARES as SHARES
from mirrorhead.lab.evaluation.results import ComparisonResults as Study
from mirrorhead.lab.evaluation.results import OptimizerResults as Rival
from mirrorhead.lab.evaluation.results import RunResults as Run
from mirrorhead.lab.evaluation.results import WeightStatistics as Weights
from mirrorhead.lab.evaluation.results import load_comparisons as load_studies
from mirrorhead.lab.evaluation.results import load_results as load_study
from mirrorhead.lab.runtime.errors import RunError as ResultsError

__all__ = [
    "KINDS", "SHARES", "STUDIES", "ResultsError", "Rival", "Run", "Study", "Weights",
    "load_studies", "load_study",
]  # fmt: skip
