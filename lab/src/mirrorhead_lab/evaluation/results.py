"""What is measured of a trained classifier, as files have it; what does not fit is refused.

`Measures` are of the weights that the run kept, `Classified` is a run with its accuracies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from msgspec import Meta, Struct

KINDS = ("key", "query", "value")
SHARES = (0.5, 0.8, 0.9, 0.95)
SCORERS = ("attention", "gradient", "random")
#: The splits of the data that a text model's attention is compared with.
SPLITS = {"eraser": ("val", "test"), "cad": ("dev", "test")}

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class RationaleScores:
    """Means over documents; `chance` is the share of words that are marked."""

    documents: int
    auprc: float
    token_f1: float
    iou_f1: float
    comprehensiveness: float
    sufficiency: float
    chance: float


@dataclass(frozen=True)
class EditScores:
    """Means over pairs, for originals; `chance` is the share of tokens that were edited."""

    pairs: int
    auprc: float
    mass: float
    chance: float


class Histogram(Struct, frozen=True):
    """Counts between edges, which are symmetric about 0."""

    edges: Annotated[tuple[float, ...], Meta(min_length=3)]
    counts: tuple[Count, ...]

    def __post_init__(self) -> None:
        edges, counts = self.edges, self.counts
        if len(counts) != len(edges) - 1:
            raise ValueError(f"{len(counts)} counts do not fit between {len(edges)} edges")
        if any(a >= b for a, b in pairwise(edges)):
            raise ValueError("edges must grow")
        uneven = max(abs(a + b) for a, b in zip(edges, reversed(edges), strict=True))
        if len(counts) % 2 or uneven > 1e-6 * edges[-1]:
            raise ValueError("edges must be symmetric about 0, which is one of them")

    def count_from(self, size: float) -> float:
        """Return how many values are at least `size` in magnitude, interpolated within bins.

        >>> Histogram((-2.0, -1.0, 0.0, 1.0, 2.0), (1, 2, 4, 3)).count_from(1.5)
        2.0
        """
        found = 0.0
        for (low, high), count in zip(pairwise(self.edges), self.counts, strict=True):
            near, far = sorted((abs(low), abs(high)))
            found += count * min(max((far - size) / (far - near), 0.0), 1.0)
        return found


class WeightStatistics(Struct, frozen=True):
    """All key, query or value weights of a model: how many are large, how sparse, how spread.

    Indices of sparsity are None where all weights are 0.
    """

    large: Count
    gini: float | None
    hoyer: float | None
    histogram: Histogram


class Entropy(Struct, frozen=True):
    """Normalized entropy of [CLS]'s attention in the last layer."""

    mean: float
    by_head: Annotated[tuple[float, ...], Meta(min_length=1)]


class Milestone(Struct, frozen=True):
    """The first epoch that reached a training accuracy, and its test accuracy."""

    epoch: Positive
    train_accuracy: Share
    test_accuracy: Share


class Measures(Struct, frozen=True, omit_defaults=True):
    """What was measured in a trained model; eraser and cad only for texts.

    Args:
        weights: by kind.
        pruned: test accuracy by the share of weights set to 0.
        eraser, cad: by split, then by what was scored.
        milestones: by training accuracy, for runs that kept their weights there.
    """

    weights: dict[str, WeightStatistics]
    pruned: dict[float, Share]
    entropy: Entropy
    eraser: dict[str, dict[str, RationaleScores]] = {}
    cad: dict[str, dict[str, EditScores]] = {}
    milestones: dict[float, Milestone] = {}

    def __post_init__(self) -> None:
        _check_keys("weights", self.weights, KINDS)
        _check_keys("pruned", self.pruned, SHARES)
        for part, splits in SPLITS.items():
            found = getattr(self, part)
            for split in splits if found else ():
                _check_keys(part, found, (split,))
                _check_keys(f"{part}.{split}", found[split], SCORERS)

    def test_accuracy_at(self, level: float) -> float | None:
        """Return test accuracy where training accuracy was `level`; None if it was not reached.

        Epochs pass a level by different amounts, fast optimizers by more, and test accuracy falls
        on the way. So this interpolates linearly between the epoch that reached the level and the
        one before it whose weights were kept.
        """
        after = self.milestones.get(level)
        if after is None:
            return None
        earlier = [one for one in self.milestones.values() if one.train_accuracy < level]
        if not earlier:
            return after.test_accuracy
        before = max(earlier, key=lambda one: one.train_accuracy)
        share = (level - before.train_accuracy) / (after.train_accuracy - before.train_accuracy)
        return before.test_accuracy + share * (after.test_accuracy - before.test_accuracy)


class Classified(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A run of a classifier; one that diverged has nothing, only a final one test scores.

    Args:
        best_epoch: whose weights the run kept; the accuracies are of this epoch.
        test: accuracy on the test set.
        seconds_per_epoch: of the fastest epoch, as other work can only add to it.
    """

    best_epoch: Positive | None = None
    train: Share | None = None
    validation: Share | None = None
    test: Share | None = None
    measures: Measures | None = None
    seconds_per_epoch: float | None = None

    def __post_init__(self) -> None:
        if (self.test is None) != (self.measures is None):
            raise ValueError("a run has either all test scores or none")

    @property
    def scores(self) -> Measures:
        """The measures of a final run."""
        if self.measures is None:
            raise ValueError("the run has no measures: it is not final, or it diverged")
        return self.measures

    @property
    def pruned(self) -> dict[float, float]:
        """Test accuracy by the share of weights set to 0."""
        return self.scores.pruned

    @property
    def best_kept(self) -> float:
        """The best test accuracy of the epochs whose weights were kept, the measured one too."""
        kept = self.scores.milestones.values()
        return max([self.test or 0.0, *(one.test_accuracy for one in kept)])


def _check_keys(what: str, found: Any, wanted: Any) -> None:
    if missing := [key for key in wanted if key not in found]:
        raise ValueError(f"{what} must have {missing[0]!r}")
