"""How many bits of the served weights does training change, and how many bytes is that?

Two trainings with float32 masters, whose weights are served in bfloat16: the GPT of the study of
language models, from scratch, and all-MiniLM-L6-v2 on TREC as in the study of patches. Each method
is tuned at three settings, so that the question is asked at rates that train. A `WeightSync`
collects after every step, every 8, every 32, and once at the end. Nothing is claimed: which method
changes the fewest bits at equal loss is an open question, and the table is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec import Struct
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from mirrorhead.patches import Patch, WeightSync
from mirrorhead.patches.file_format import encode
from mirrorhead_lab.findings.table import Table, mean, word
from mirrorhead_lab.models.pretrained import accuracy, default_encoder
from mirrorhead_lab.studies import optimizers
from mirrorhead_lab.studies.study import Method, Rows, Setting, Study, Trial
from mirrorhead_lab.studies.tables import PLUS_MINUS, in_words, tuning_table
from mirrorhead_lab.training import language_model as gpt
from mirrorhead_lab.training import sparse_tuning as tuning
from mirrorhead_lab.training.language_model import Corpus, LanguageSettings
from mirrorhead_lab.training.sparse_tuning import Bench
from mirrorhead_lab.training.tuning import TuneSettings

GPT, TREC = "GPT", "TREC"
SPANS = (1, 8, 32)
ALL = 0  # the span from the first step to the last
SETTINGS = LanguageSettings()


class Sent(Struct, frozen=True, kw_only=True):
    """What a run measures; a run that diverged has no validation score.

    validation: the score that tuning compares: accuracy on TREC, minus the loss of the GPT.
    test: accuracy on TREC, the loss of the GPT in nats per character.
    shares: of the weights that a patch holds, the mean over patches, by span.
    bytes: of a patch without the base's values over 2 bytes for each weight.
    """

    validation: float | None = None
    test: float | None = None
    shares: dict[int, float] = {}
    bytes: dict[int, float] = {}


class Watch:
    """Collects the patches of a training and notes their sizes.

    Args:
        model: what is trained; parameters that need no gradient are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = {name: w for name, w in model.named_parameters() if w.requires_grad}
        self.syncs = {span: WeightSync(trained) for span in (*SPANS, ALL)}
        self.shares: dict[int, list[float]] = {span: [] for span in self.syncs}
        self.bytes: dict[int, list[float]] = {span: [] for span in self.syncs}
        self.step = 0

    def after_step(self, *unused: Any) -> None:
        self.step += 1
        for span in SPANS:
            if self.step % span == 0:
                self.note(span)

    def note(self, span: int) -> None:
        patch: Patch = self.syncs[span].collect()
        content = encode(patch.tensors, patch.weights, {}, originals=False)
        self.shares[span].append(patch.count / patch.weights)
        self.bytes[span].append(len(content) / (2 * patch.weights))

    def result(self, validation: float, test: float | None) -> Sent:
        if not math.isfinite(validation):
            return Sent()
        self.note(ALL)
        shares, sizes = (
            {span: fmean(found) for span, found in every.items() if found}
            for every in (self.shares, self.bytes)
        )
        return Sent(validation=validation, test=test, shares=shares, bytes=sizes)


def load(task: str, folder: Path | None, settings: LanguageSettings = SETTINGS) -> Any:
    if task == GPT:
        return Corpus.of_imdb(settings, folder)
    from mirrorhead_lab.datasets import find

    return default_encoder(), find("trec").read(folder)


def run(
    trial: Trial,
    data: Any,
    folder: Path,
    settings: LanguageSettings = SETTINGS,
    tune: TuneSettings | None = None,
) -> Sent:
    """Train with one method, collecting patches on the way."""
    how = METHODS[trial.method].how
    if trial.task == GPT:
        return _run_gpt(trial, data, how, settings)
    encoder, texts = data
    bench = Bench(encoder, texts, tune or TuneSettings(seed=trial.seed))
    model = bench.model()
    matrices = list(model.train_matrices().values())
    watch = Watch(model)
    optimizer, after = how(bench, matrices, trial.setting)

    def after_step(factor: float) -> None:
        if after is not None:
            after(factor)
        watch.after_step()

    bench.tune(model, optimizer, after_step)
    test = accuracy(model, bench.sets.test) if trial.final else None
    return watch.result(accuracy(model, bench.sets.validation), test)


def _run_gpt(trial: Trial, corpus: Corpus, how: Any, settings: LanguageSettings) -> Sent:
    watching: list[Watch] = []

    def make(model: nn.Module, lr: float) -> list[Optimizer]:
        watching.append(Watch(model))
        return how(model, lr)

    def after_step(*about: Any) -> None:
        watching[0].after_step()

    found = gpt.train(corpus, settings, make, trial.setting["lr"], trial.seed, after_step)
    if len(found.curve) < settings.steps // settings.record_every:
        return Sent()
    test = gpt.loss_of(found.model, corpus.test) if trial.final else None
    return watching[0].result(-gpt.loss_of(found.model, corpus.validation), test)


def sgd(model: nn.Module, lr: float) -> list[Optimizer]:
    return [SGD(model.parameters(), lr, momentum=0.9)]


#: Makes the optimizer of a model's matrices, and what is to be done after each step.
Tuner = Callable[[Bench, list[nn.Parameter], Setting], tuple[Optimizer, Any]]


def _tuned_sgd(bench: Bench, matrices: list[nn.Parameter], at: Setting) -> tuple[Optimizer, Any]:
    return SGD(matrices, at["lr"], momentum=0.9), None


def _tuned_muon(bench: Bench, matrices: list[nn.Parameter], at: Setting) -> tuple[Optimizer, Any]:
    return Muon(matrices, at["lr"], weight_decay=0, adjust_lr_fn="match_rms_adamw"), None


def _rates(how: Any, task: str, *rates: float) -> Method:
    return Method(tuple({"lr": rate} for rate in rates), how, (task,))


def _tuned(name: str, *settings: Setting) -> Method:
    def how(bench: Bench, matrices: list[nn.Parameter], at: Setting) -> tuple[Optimizer, Any]:
        return tuning.optimizer_of(bench, name, matrices, at)

    return Method(settings, how, (TREC,))


METHODS = {
    "AdamW": _rates(optimizers.adamw(0.999), GPT, 1e-3, 3e-3, 1e-2),
    "Muon, AdamW": _rates(
        optimizers.muon(partial(AdamW, weight_decay=0, fused=True)), GPT, 1e-3, 3e-3, 1e-2
    ),
    "SGD": _rates(sgd, GPT, 0.1, 0.3, 1.0),
    "MirrorAdam p=1.1, no knee": _rates(optimizers.mirror_adam(1.1, None), GPT, 3e-4, 1e-3, 3e-3),
    "AdamW on matrices": _tuned("adamw", {"lr": 5e-5}, {"lr": 1e-4}, {"lr": 2e-4}),
    "Muon on matrices": _rates(_tuned_muon, TREC, 5e-5, 1e-4, 3e-4),
    "SGD on matrices": _rates(_tuned_sgd, TREC, 3e-3, 1e-2, 3e-2),
    "MirrorAdam, centred": _tuned("mirror", *({"p": p, "reach": 1.5} for p in (1.02, 1.03, 1.05))),
    "AdamW, proximal l1": _tuned(
        "proximal", *({"lr": 0.05, "l1": 0.95}, {"lr": 0.05, "l1": 0.98}, {"lr": 0.1, "l1": 0.95})
    ),
}


def table(rows: Rows[Sent], task: str) -> Table:
    """Return what the final runs of each method of a task sent."""
    names = [name for name in METHODS if task in rows.study.tasks_of(name)]
    kind = {ALL: "all steps", 1: "each step"}

    def column(of: Callable[[Sent], float | None], digits: int, scale: float = 1.0) -> Any:
        def cell(name: str) -> Any:
            values = [value for run in rows.final(name, task) if (value := of(run)) is not None]
            return mean(values, digits, scale)

        return cell

    columns: dict[str, Any] = {
        "Method": word,
        "Setting": lambda name: word(in_words(rows.chosen(name, task) or {})),
        "Test": column(lambda run: run.test, 3),
    }
    for span in (*SPANS, ALL):
        columns[f"{kind.get(span, f'{span} steps')}: changed, %"] = column(
            lambda run, k=span: run.shares.get(k), 2, 100
        )
        columns[f"{kind.get(span, f'{span} steps')}: bytes, %"] = column(
            lambda run, k=span: run.bytes.get(k), 2, 100
        )
    begun = [name for name in names if rows.final(name, task)]
    note = (
        f"{PLUS_MINUS} Shares of the weights whose bits in bfloat16 a patch changes, and bytes of"
        " the patch over those of all weights in bfloat16."
    )
    return Table.of(f"weight-sync-{task.lower()}", f"Patches of {task}", columns, begun, note)


STUDY = Study(
    name="weight-sync",
    title="How many bits does training change?",
    methods=METHODS,
    tasks=(GPT, TREC),
    seeds=(1, 2, 3),
    tuning_seed=0,
    measured=Sent,
    load=load,
    run=run,
    score=lambda measured: measured.validation,
    seconds=120,
    tables=lambda rows: (table(rows, GPT), table(rows, TREC), tuning_table(rows)),
    docs=("weight-sync", "costs"),
)
