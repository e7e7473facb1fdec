"""Studies of classifiers: one preset on one data set, trained by several optimizers.

`classifier_study` makes a study of them: a run trains (`complete_run`), and a final one is then
measured (`measure`). A run keeps its folder, so one that was interrupted resumes, and the final run
of tuning's seed takes tuning's model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from mirrorhead_lab.datasets import DataSet, find
from mirrorhead_lab.datasets.sources import data_root
from mirrorhead_lab.evaluation.measures import EvaluationData, fitting_parts, measure
from mirrorhead_lab.evaluation.results import Classified, Measures
from mirrorhead_lab.evaluation.sparsity import LARGE, large_from
from mirrorhead_lab.models import TextSettings
from mirrorhead_lab.runtime.errors import Diverged
from mirrorhead_lab.runtime.json_files import from_plain
from mirrorhead_lab.studies.claims import MARGIN, Comparison, Measure
from mirrorhead_lab.studies.study import Method, Study, Trial
from mirrorhead_lab.training.classification import complete_run
from mirrorhead_lab.training.presets import Preset, Sets, load_sets, preset
from mirrorhead_lab.training.run_folder import Outcome, Score, fastest_epoch, load_run
from mirrorhead_lab.training.settings import OWN, OptimizerName, OptimizerSettings


@dataclass(frozen=True)
class Classifier:
    """What is trained, and on what.

    Args:
        preset: its name; everything but the optimizer.
        data: as `datasets.find` takes it.
        epochs: instead of the preset's.
        partial: whether slices of data sets are accepted.
        annotated: whether attention is compared with what people marked, where the data set's
            texts fit such sets.
    """

    preset: str
    data: str
    epochs: int | None = None
    partial: bool = False
    annotated: bool = True

    @functools.cached_property
    def data_set(self) -> DataSet:
        return find(self.data)

    @functools.cached_property
    def base(self) -> Preset:
        """The preset, with any optimizer."""
        return self.trained_by(OptimizerSettings("sgd"), seed=0)

    def trained_by(self, rule: OptimizerSettings, seed: int) -> Preset:
        """Return the settings of a run."""
        found = preset(self.preset, rule, data=self.data)
        epochs = found.training.epochs if self.epochs is None else self.epochs
        training = dataclasses.replace(found.training, seed=seed, epochs=epochs)
        return dataclasses.replace(found, training=training)

    @property
    def to_the_end(self) -> bool:
        """Whether the weights of the last epoch are measured, not those of the best."""
        return self.base.training.choose == "last"

    @property
    def large(self) -> float:
        """The size from which weights count as large: for texts, that of the model's width.

        Figure 8 is about the text models. Images keep the paper's 0.06, at which counts are exact.
        """
        model = self.base.model
        return large_from(model.dim) if isinstance(model, TextSettings) else LARGE

    def count_large(self, kind: str, run: Classified) -> float:
        """Return the number of large weights: exact at 0.06, else from the histogram."""
        found = run.scores.weights[kind]
        return found.large if self.large == LARGE else found.histogram.count_from(self.large)

    @property
    def parts(self) -> list[str]:
        """What is measured of a final run, besides its test accuracy."""
        parts = [part for part in fitting_parts(self.base) if part != "test"]
        own = self.data_set.annotated
        return [part for part in parts if self.annotated or part not in own]


@dataclass(frozen=True)
class Data:
    """What runs are trained on, and what they are measured on."""

    sets: Sets
    evaluation: EvaluationData


def load(about: Classifier, task: str, folder: Path | None) -> Data:
    """Read the sets; those of the measures are read by the first run that needs them."""
    return _load(about, data_root(folder).resolve())


@functools.lru_cache(maxsize=1)
def _load(about: Classifier, folder: Path) -> Data:
    settings = about.base.model
    length = settings.max_length if isinstance(settings, TextSettings) else None
    evaluation = EvaluationData(about.data, length, folder, about.partial)
    evaluation.require(about.parts)
    return Data(load_sets(about.base, folder, partial=about.partial), evaluation)


def train(
    about: Classifier, methods: Mapping[str, Method], trial: Trial, data: Data, folder: Path
) -> tuple[Outcome, Score | None]:
    """Train one classifier in its folder, unless it is there; score it on test if it is final."""
    how, make = methods[trial.method].how, None
    if isinstance(how, OptimizerSettings):
        rule = dataclasses.replace(how, **trial.setting)
    else:
        rule, make = OptimizerSettings(OWN), partial(how, **trial.setting)
    chosen = about.trained_by(rule, trial.seed)
    options: Any = {"test": trial.final, "wait": True, "optimizer": make}
    return complete_run(chosen, data.sets, folder, **options)


def run(
    about: Classifier, methods: Mapping[str, Method], trial: Trial, data: Data, folder: Path
) -> Classified:
    """Train one classifier; measure it if it is final."""
    try:
        outcome, score = train(about, methods, trial, data, folder)
    except Diverged:
        return Classified()
    found = Classified(
        best_epoch=outcome.best_epoch,
        train=outcome.epochs[outcome.best_epoch - 1]["train_accuracy"],
        validation=outcome.best_accuracy,
        seconds_per_epoch=fastest_epoch(folder),
    )
    if score is None:
        return found
    measures = measure(load_run(folder), data.evaluation, about.parts)
    schema = from_plain(measures, Measures, str(folder))
    return structs.replace(found, test=score.accuracy, measures=schema)


def score(about: Classifier, measured: Classified) -> float | None:
    """Return validation accuracy; with milestones, plus how many of them training passed.

    A small rate that leaves the training set half learnt would otherwise win by stopping early.
    """
    if measured.validation is None:
        return None
    train, milestones = measured.train or 0.0, about.base.training.milestones
    return measured.validation + sum(train >= share for share in milestones)


def rates(name: OptimizerName, *lrs: float, **options: Any) -> Method:
    """Return an optimizer as a method, and the learning rates that tuning compares."""
    rule = OptimizerSettings(name, **options)
    return Method(tuple({"lr": lr} for lr in sorted(lrs)), rule)


def classifier_study(what: Classifier, methods: Mapping[str, Method], /, **more: Any) -> Study[Any]:
    """Return a study of a classifier; `more` has its name, title, seeds, claims and the like.

    A method's `how` is an optimizer's settings (see `rates`), or any function of the model and the
    setting that returns an optimizer: Method(({"lr": 1e-3},), lambda model, lr: ...).
    """
    from mirrorhead_lab.studies import classifier_results as results

    counts = sorted({len(method.settings) for method in methods.values()})
    seed = more.get("tuning_seed", more["seeds"][0])
    return Study(
        **{
            "methods": methods,
            "measured": Classified,
            "load": partial(load, what),
            "run": partial(run, what, methods),
            "score": partial(score, what),
            "tuning": tuning_in_words(what, counts, seed),
            "figures": results.drawings(what),
            "tables": partial(results.tables, what),
            "group": "Real data",
            **more,
        }
    )


def tuning_in_words(about: Classifier, counts: list[int], seed: int) -> str:
    """Say how learning rates are tuned."""
    chooses = "the best validation accuracy chooses"
    if about.base.training.milestones:
        shares = ", ".join(f"{100 * share:g}" for share in about.base.training.milestones if share)
        chooses = (
            "of the rates whose last epoch passes the most milestones of training accuracy"
            f" ({shares} %), the best validation accuracy after the last epoch chooses"
        )
    return (
        f"{' or '.join(map(str, counts))} learning rates for each method, each run once with seed"
        f" {seed}; {chooses}, of equals the smaller rate; the chosen one is run with every seed,"
        " and only these read the test set"
    )


#: An accuracy, in points.
_accuracy = partial(Measure, digits=2, scale=100, unit=" points")
ACCURACY = _accuracy("test accuracy", lambda run: run.test)
#: What the paper's Table 1 is of all epochs.
BEST_KEPT = _accuracy("best test accuracy of the kept epochs", lambda run: run.best_kept)


def after_pruning(share: float) -> Measure:
    name = f"accuracy with {100 * share:g} % pruned"
    return _accuracy(name, lambda run: run.scores.pruned[share])


def at_equal_training(share: float) -> Measure:
    name = f"test accuracy at {100 * share:g} % training accuracy"
    return _accuracy(name, lambda run: run.scores.test_accuracy_at(share), may_lack=True)


def large_weights(about: Classifier, kind: str) -> Measure:
    name = f"large weights of {kind[0].upper()}"
    return Measure(name, partial(about.count_large, kind), 0, higher=False)


def sparsity(index: str, kind: str) -> Measure:
    name = f"{index.capitalize()} index of {kind[0].upper()}"
    return Measure(name, lambda run: getattr(run.scores.weights[kind], index))


def attention(part: str, split: str, index: str = "auprc") -> Measure:
    sets = {"eraser": "ERASER", "cad": "counterfactual edits"}
    indices = {"auprc": "AUPRC of attention", "mass": "attention on edits"}
    return Measure(
        f"{sets[part]} {split}, {indices[index]}",
        lambda run: getattr(getattr(run.scores, part)[split]["attention"], index),
    )


def prunes(one: str, two: str, *, primary: bool = True) -> tuple[Comparison, ...]:
    """Return what it means to be as accurate, and more accurate after pruning."""
    return (
        Comparison(ACCURACY, one, two, primary, MARGIN),
        Comparison(after_pruning(0.9), one, two, primary),
        Comparison(after_pruning(0.95), one, two, primary=False),
    )


#: The rule of studies that repeat the paper's comparisons at a smaller scale.
RULE = (
    "Each comparison is between means over seeds. It is as claimed if Welch's 95 % interval of the"
    " difference lies entirely on the claimed side. A claim holds if all its comparisons are as"
    " claimed, and holds with a remark if every primary one is but a secondary one is not."
    " Otherwise a claim of the paper about a larger model or longer training is not seen at this"
    " scale. A claim about what was run here does not hold if a primary comparison is the other way"
    " with its whole interval, and is not decided if none is."
    f" About as accurate means less than {100 * MARGIN:g} point below."
)
