"""Beside the study of language models: what p does to a step, a smaller model, longer runs.

    python benchmarks/language_model.py moves   # how far weights of different size move, by p
    python benchmarks/language_model.py rates   # equal learning rates for all, on a smaller model
    python benchmarks/language_model.py longer  # three times as many steps as in the study

docs/evidence/language-model.md has the tables. The study itself is `mirrorhead study language-model`.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrorhead_lab.evaluation.language_results import (
    METHODS,
    append_run,
    compute,
    load_runs,
)
from mirrorhead_lab.models.gpt import GPTSettings
from mirrorhead_lab.training.language_model import (
    Corpus,
    LanguageSettings,
    loss_of,
    train,
)


def moves(options: argparse.Namespace) -> None:
    """Print the mean change of a weight per step, over lr, by its size over the first rms r."""
    short = LanguageSettings(steps=200, record_every=200)
    corpus = Corpus.of_imdb(short)
    sizes = (*(f"{a:g}-{b:g}" for a, b in pairwise((0, *EDGES))), f"> {EDGES[-1]:g}")
    print(f"{'|w| / r':28}" + "".join(f"{size:>12}" for size in sizes))
    for name, method in METHODS.items():
        steps = Steps()
        train(corpus, short, method, 1e-3, 0, steps)
        print(f"{name:28}" + "".join(f"{x:12.3f}" for x in steps.means()), flush=True)


def rates(options: argparse.Namespace) -> None:
    """Print the test loss of a GPT of 2 blocks, 64 wide, by method and rate, over three seeds."""
    small = LanguageSettings(GPTSettings(dim=64, layers=2), 600, 8, 600)
    rates = (3e-4, 1e-3, 3e-3, 1e-2)
    corpus = Corpus.of_imdb(small)
    print(f"{'':28}" + "".join(f"{lr:>18g}" for lr in rates))
    for name, method in METHODS.items():
        if options.methods and name not in options.methods:
            continue
        print(f"{name:28}", end="", flush=True)
        for lr in rates:
            models = [train(corpus, small, method, lr, seed).model for seed in range(3)]
            losses = [loss_of(model, corpus.test) for model in models]
            print(f"{f'{fmean(losses):.3f} ± {stdev(losses):.3f}':>18}", end="", flush=True)
        print(flush=True)


def longer(options: argparse.Namespace) -> None:
    """Print the test loss after three times as many steps as in the study. It resumes."""
    path = Path(__file__).parents[1] / "results" / "language-model-longer.jsonl"
    settings = LanguageSettings(steps=6_000)
    runs, corpus = load_runs(path), None
    for seed in (1, 2):
        for method, lr in LONGER:
            if (method, lr, seed) not in runs:
                corpus = corpus or Corpus.of_imdb(settings)
                run = compute(corpus, settings, method, lr, seed)
                runs[run.key] = run
                append_run(path, run)
    for method, lr in LONGER:
        found = [run.test for run in runs.values() if (run.method, run.lr) == (method, lr)]
        losses = [loss for loss in found if loss is not None]
        spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
        mean = f"{fmean(losses):.4f}{spread}" if losses else "diverged"
        print(f"{method:28}{lr:>8g}  {mean}")


LONGER = (
    ("AdamW", 1.7e-3), ("MirrorAdam p=1.25", 3e-3), ("MirrorAdam p=1.1, no knee", 1e-3)
)  # fmt: skip
EDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Steps:
    """The steps of all matrices in the second half of a short run, by the size of the weight."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.rms: dict[str, float] = {}
        self.sums, self.counts = torch.zeros(2, len(EDGES) + 1, dtype=torch.float64)

    def __call__(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or name == "tokens.weight":  # rows of other characters do not move
                continue
            now = weight.detach().clone()
            self.rms.setdefault(name, float(now.square().mean().sqrt()))
            if step >= 100:
                before = self.before[name]
                place = torch.bucketize(before.abs() / self.rms[name], torch.tensor(EDGES))
                moved = (now - before).abs().double() / optimizer.param_groups[0]["lr"]
                self.sums += torch.bincount(place.flatten(), moved.flatten(), len(self.sums))
                self.counts += torch.bincount(place.flatten(), minlength=len(self.sums))
            self.before[name] = now

    def means(self) -> list[float]:
        return (self.sums / self.counts).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    actions = {"moves": moves, "rates": rates, "longer": longer}
    parser.add_argument("action", choices=actions)
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="rates: only these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    actions[options.action](options)


if __name__ == "__main__":
    main()
