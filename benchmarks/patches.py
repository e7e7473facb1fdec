"""Accuracy against patch size: centred mirror descent and other ways to a sparse fine-tune.

    python benchmarks/patches.py run       # resumes where it stopped; about ten hours of one core
    python benchmarks/patches.py table     # what the results say so far, with verdicts
    python benchmarks/patches.py merge     # three tasks on one base
    python benchmarks/patches.py step      # time and memory of a step against AdamW
    python benchmarks/patches.py theory    # closest point in the p-norm, against cvxpy

all-MiniLM-L6-v2; 2,000 training texts of at most 32 tokens, two epochs (IMDb: 1,500 of 128).
Three settings of each method are compared on validation data, by the mean accuracy at 0.1 % and
0.03 %. Five seeds of the chosen one are scored on test data, once. Every method trains the head,
and none counts it. Each run appends a line to the results file; a line that is there is not
computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import AdamW, Optimizer

from mirrorhead import MirrorAdam
from mirrorhead.lab.datasets import LabelledTexts, Sentences, load_imdb, load_sentences
from mirrorhead.lab.models.pretrained import PretrainedClassifier, accuracy, default_encoder
from mirrorhead.lab.training.tuning import TuneSets, TuneSettings, fine_tune, patch_of
from mirrorhead.patches import Patch
from mirrorhead.patches.file_format import encode

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "patches.jsonl"
TASKS = ("trec", "sst2", "subj", "cr")
SIZES = (0.1, 0.01, 0.003, 0.001, 0.0003, 0.0001)
SMALL = (0.001, 0.0003)  # where the claim is decided
SEEDS = range(5)


@dataclass(frozen=True)
class Method:
    """A way to fine-tune: its settings to choose from, and how often it has to train."""

    settings: tuple[dict[str, float], ...]
    per_size: bool = False  # a mask is chosen beforehand, so each size is a run of its own
    runs: int = 1  # training runs behind one line
    sized: bool = True  # False: the size is fixed by the method (LoRA, BitFit)


def _lr(*rates: float, **fixed: float) -> tuple[dict[str, float], ...]:
    return tuple({"lr": rate, **fixed} for rate in rates)


METHODS = {
    "mirror": Method(
        ({"p": 1.05, "reach": 0.5}, {"p": 1.1, "reach": 0.5}, {"p": 1.1, "reach": 1.5})
    ),
    "adamw": Method(_lr(5e-5, 1e-4, 2e-4)),
    "dare": Method(_lr(5e-5, 1e-4, 2e-4)),
    "proximal": Method(tuple({"lr": 1e-4, "l1": l1} for l1 in (0.1, 0.3, 1.0))),
    "soft": Method(tuple({"lr": 2e-4, "threshold": t} for t in (1e-3, 3e-3, 6e-3))),
    "sinh": Method(tuple({"lr": 2e-4, "scale": b} for b in (3e-4, 1e-3, 3e-3))),
    "random-mask": Method(_lr(1e-3, 3e-3, 1e-2), per_size=True),
    "gradient-mask": Method(_lr(1e-3, 3e-3, 1e-2), per_size=True),
    "lt-sft": Method(_lr(3e-4, 1e-3, 3e-3), per_size=True, runs=2),
    "lora-1": Method(_lr(5e-4, 1e-3, 3e-3, rank=1), sized=False),
    "lora-4": Method(_lr(5e-4, 1e-3, 3e-3, rank=4), sized=False),
    "lora-16": Method(_lr(5e-4, 1e-3, 3e-3, rank=16), sized=False),
    "bitfit": Method(_lr(1e-3, 3e-3, 1e-2), sized=False),
}


@dataclass(frozen=True)
class Run:
    """One line of the results."""

    task: str
    method: str
    setting: dict[str, float]
    seed: int
    size: float | None
    final: bool

    @property
    def key(self) -> str:
        words = [self.task, self.method, json.dumps(self.setting, sort_keys=True), str(self.seed)]
        return "|".join([*words, str(self.size), "final" if self.final else "tune"])


def load_task(name: str) -> Sentences:
    """One of the four sets of sentences, or IMDb with a validation set drawn from train."""
    if name != "imdb":
        return load_sentences(name)
    parts = {split: load_imdb(split) for split in ("train", "test")}
    texts = {s: LabelledTexts(part.texts, part.labels).sample(None) for s, part in parts.items()}

    def cut(split: str, start: int, end: int) -> LabelledTexts:
        return LabelledTexts(texts[split].texts[start:end], texts[split].labels[start:end])

    sets = cut("train", 0, 1500), cut("train", 1500, 2500), cut("test", 0, 1000)
    return Sentences("imdb", ("negative", "positive"), *sets)


class Bench:
    """A task with its texts encoded, and models as they come from the base's folder."""

    def __init__(self, task: str, seed: int, texts: int | None = None) -> None:
        long = task == "imdb"
        self.settings = TuneSettings(
            texts=texts or (1500 if long else 2000), max_length=128 if long else 32, seed=seed
        )
        self.folder = default_encoder()
        self.data = load_task(task)
        self.sets = TuneSets.of(self.data, self.folder, self.settings)

    def model(self) -> PretrainedClassifier:
        torch.manual_seed(self.settings.seed)
        return PretrainedClassifier(self.folder, len(self.data.classes))

    @property
    def full_steps(self) -> float:
        """The sum of the schedule: linear warm-up over a tenth, then linear decay."""
        from mirrorhead.lab.training.tuning import schedule

        count = len(self.sets.train) // self.settings.batch_size
        steps = self.settings.epochs * max(1, count)
        return sum(schedule(step, steps, self.settings.warmup) for step in range(steps))

    def tune(self, model: PretrainedClassifier, optimizer: Optimizer, after: Any = None) -> None:
        fine_tune(model, self.sets, self.settings, optimizer, after_step=after)


def train(bench: Bench, method: str, setting: dict[str, float], size: float | None) -> Any:
    """Fine-tune a fresh model by a method; the model, and its matrices by name."""
    model = bench.model()
    matrices = model.train_matrices()
    weights = list(matrices.values())
    after: Callable[[float], None] | None = None
    lr = setting.get("lr", 0.0)
    if method == "mirror":
        optimizer: Optimizer = MirrorAdam(
            weights, setting["reach"], p=setting["p"], center="init", steps=bench.full_steps
        )
    elif method in ("soft", "sinh"):
        link = soft_link(setting["threshold"]) if method == "soft" else sinh_link(setting["scale"])
        optimizer = CenteredAdam(weights, lr, link)
    elif method in ("adamw", "dare", "proximal"):
        optimizer = AdamW(weights, lr, weight_decay=0.0)
        if method == "proximal":
            after = _proximal_step(weights, lr * setting["l1"])
    elif method in ("random-mask", "gradient-mask", "lt-sft"):
        assert size is not None
        masks = _masks(bench, method, matrices, size, lr)
        for w, mask in zip(weights, masks, strict=True):
            w.register_hook(lambda grad, mask=mask: grad * mask)
        optimizer = AdamW(weights, lr, weight_decay=0.0)
    elif method == "bitfit":
        weights = [w for n, w in model.encoder.named_parameters() if n.endswith("bias")]
        for w in model.encoder.parameters():
            w.requires_grad_(False)
        for w in weights:
            w.requires_grad_(True)
        optimizer = AdamW(weights, lr, weight_decay=0.0)
    else:
        optimizer = AdamW(_add_lora(model, matrices, int(setting["rank"])), lr, weight_decay=0.0)
    bench.tune(model, optimizer, after)
    if method.startswith("lora"):
        for module in model.encoder.modules():
            if parametrize.is_parametrized(module):
                parametrize.remove_parametrizations(module, "weight")
    return model, matrices


def _proximal_step(weights: list[nn.Parameter], threshold: float) -> Callable[[float], None]:
    """After a step of AdamW: soft(w - w0, threshold), w0 being the weights now."""
    start = [w.detach().clone() for w in weights]

    def after(factor: float) -> None:
        with torch.no_grad():
            for w, w0 in zip(weights, start, strict=True):
                w.copy_(w0 + nn.functional.softshrink(w - w0, factor * threshold))

    return after


def _masks(
    bench: Bench, method: str, matrices: dict[str, nn.Parameter], size: float, lr: float
) -> list[Tensor]:
    """A mask for each matrix with `size` of all weights: drawn, by gradient, or by a first run."""
    weights = list(matrices.values())
    count = round(size * sum(w.numel() for w in weights))
    if method == "random-mask":
        generator = torch.Generator().manual_seed(bench.settings.seed)
        scores = [torch.rand(w.shape, generator=generator) for w in weights]
    elif method == "lt-sft":
        first = bench.model()
        inner = first.train_matrices()
        before = [w.detach().clone() for w in inner.values()]
        bench.tune(first, AdamW(inner.values(), 1e-4, weight_decay=0.0))
        scores = [(w.detach() - b).abs() for w, b in zip(inner.values(), before, strict=True)]
    else:
        scores = _gradient_scores(bench)
    flat = torch.cat([score.flatten() for score in scores])
    least = flat.topk(count).values[-1]
    return [(score >= least).float() for score in scores]


def _gradient_scores(bench: Bench, batches: int = 8) -> list[Tensor]:
    """|gradient| of some batches at the base, under a head that has seen them once."""
    model = bench.model()
    matrices = list(model.train_matrices().values())
    head = AdamW(model.head.parameters(), 5e-3)
    total = [torch.zeros_like(w) for w in matrices]
    generator = torch.Generator().manual_seed(bench.settings.seed)
    places = bench.sets.train.shuffled(bench.settings.batch_size, generator)[:batches]
    for turn in range(2):
        for batch in places:
            ids, mask, labels = bench.sets.train.batch(batch)
            nn.functional.cross_entropy(model(ids, mask), labels).backward()
            if turn == 0:
                head.step()
            else:
                for score, w in zip(total, matrices, strict=True):
                    assert w.grad is not None
                    score += w.grad.abs()
            model.zero_grad()
    return total


class _LowRank(nn.Module):
    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(rank, columns) / math.sqrt(columns))
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def _add_lora(
    model: PretrainedClassifier, matrices: dict[str, nn.Parameter], rank: int
) -> list[nn.Parameter]:
    """w0 + up down for each matrix; the new parameters."""
    found: list[nn.Parameter] = []
    for name, weight in matrices.items():
        weight.requires_grad_(False)
        module = model.encoder.get_submodule(name.rpartition(".")[0])
        low = _LowRank(weight, rank)
        parametrize.register_parametrization(module, "weight", low)
        found += [low.down, low.up]
    return found


def perform(run: Run, texts: int | None = None) -> dict[str, Any]:
    """Train, score patches of every size, and describe the result as a line."""
    began = time.perf_counter()
    method = METHODS[run.method]
    bench = Bench(run.task, run.seed, texts)
    model, matrices = train(bench, run.method, run.setting, run.size)
    total = sum(w.numel() for w in matrices.values())
    tuned = model.tuned_state()
    line: dict[str, Any] = {
        "key": run.key, "task": run.task, "method": run.method, "setting": run.setting,
        "seed": run.seed, "size": run.size, "final": run.final, "runs": method.runs,
        "validation": {}, "test": {}, "bytes": {}, "compressed": {},
    }  # fmt: skip
    line["identical"] = _identical(model.base, tuned)
    sizes: list[float | None] = [None]
    if method.sized:
        sizes = [run.size] if method.per_size else [None, *SIZES]
    for size in sizes:
        name = "all" if size is None else f"{size:g}"
        state = tuned
        if run.method == "dare" and size is not None:
            state = _dare(model.base, tuned, size, run.seed)
        count = None if size is None or run.method == "dare" else max(1, round(size * total))
        patch = patch_of(model, state, count)
        patched = {n: t.clone() if n in patch.tensors else t for n, t in model.base.items()}
        patch.apply(patched)
        model.load_tuned(patched)
        line["validation"][name] = accuracy(model, bench.sets.validation)
        if run.final:
            line["test"][name] = accuracy(model, bench.sets.test)
        data = encode(patch.without("head.*").tensors, patch.weights, originals=False)
        line["bytes"][name] = len(data)
        line["compressed"][name] = len(zlib.compress(data, 9))
    if run.method.startswith("lora"):
        rank = int(run.setting["rank"])
        line["bytes"] = {"all": sum(4 * rank * sum(w.shape) for w in matrices.values())}
        line["compressed"] = {}
    line["seconds"] = round(time.perf_counter() - began, 1)
    return line


def _identical(base: dict[str, Tensor], tuned: dict[str, Tensor]) -> dict[str, float]:
    """Share of the weights of changed tensors that keep their bits, in float32 and in bf16."""
    names = [n for n, t in base.items() if t.ndim == 2 and not torch.equal(t, tuned[n])]
    total = max(1, sum(base[n].numel() for n in names))
    same = sum(int((base[n] == tuned[n]).sum()) for n in names)
    half = sum(int((base[n].bfloat16() == tuned[n].bfloat16()).sum()) for n in names)
    return {"F32": same / total, "BF16": half / total}


def _dare(
    base: dict[str, Tensor], tuned: dict[str, Tensor], share: float, seed: int
) -> dict[str, Tensor]:
    """Keep each change with probability `share` and divide it by that."""
    generator = torch.Generator().manual_seed(seed)
    state = dict(tuned)
    for name, before in base.items():
        if before.is_floating_point() and not torch.equal(before, tuned[name]):
            kept = torch.rand(before.shape, generator=generator) < share
            state[name] = before + kept * (tuned[name] - before) / share
    return state


def lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of the results; a last line that was cut short is ignored."""
    found = []
    for text in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def planned(tasks: tuple[str, ...], done: list[dict[str, Any]], seeds: range) -> Iterator[Run]:
    """All runs in order; the final ones follow when a method's settings are all compared."""
    for task in tasks:
        for name, method in METHODS.items():
            size = SMALL[0] if method.per_size else None
            for setting in method.settings:
                yield Run(task, name, setting, 0, size, False)
        for name, method in METHODS.items():
            setting = chosen(task, name, done)
            if setting is None:
                continue
            for seed in seeds:
                for size in SIZES if method.per_size else (None,):
                    yield Run(task, name, setting, seed, size, True)


def chosen(task: str, method: str, done: list[dict[str, Any]]) -> dict[str, float] | None:
    """The setting with the best validation score, once all settings have one."""
    found = [d for d in done if (d["task"], d["method"], d["final"]) == (task, method, False)]
    if len(found) < len(METHODS[method].settings):
        return None
    return max(found, key=tuning_score)["setting"]


def tuning_score(line: dict[str, Any]) -> float:
    """Mean validation accuracy at the small sizes, or at the only size that there is."""
    scores = line["validation"]
    small = [scores[f"{size:g}"] for size in SMALL if f"{size:g}" in scores]
    return float(np.mean(small or list(scores.values())))


def run_all(options: argparse.Namespace) -> None:
    """Compute what is missing, a line at a time."""
    options.results.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    while options.limit is None or count < options.limit:
        done = lines(options.results)
        keys = {line["key"] for line in done}
        todo = (
            r
            for r in planned(tuple(options.tasks), done, range(options.seeds))
            if r.key not in keys
        )
        run = next(todo, None)
        if run is None:
            print("all runs are in the results")
            return
        line = perform(run, options.texts)
        with options.results.open("a") as file:
            file.write("\n" * _unended(options.results) + json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        count += 1
        print(f"{run.key}: {line['validation']} ({line['seconds']} s)", flush=True)


def _unended(file: Path) -> bool:
    """Whether the last line was cut short, by a power cut or a full disk."""
    data = file.read_bytes()
    return bool(data) and not data.endswith(b"\n")


def table(options: argparse.Namespace) -> None:
    """Test accuracy by size, mean and standard deviation over seeds, and the verdict."""
    done = [line for line in lines(options.results) if line["final"]]
    for task in sorted({line["task"] for line in done}):
        print(f"\n{task}: test accuracy, mean (standard deviation), % of weights changed")
        columns = ["all", *(f"{size:g}" for size in SIZES)]
        print(f"{'method':14}{'runs':>5}" + "".join(f"{c:>13}" for c in columns))
        for name, method in METHODS.items():
            cells = [_values(done, task, name, c) for c in columns]
            if any(cells):
                runs = method.runs * (len(SIZES) if method.per_size else 1)
                texts = [
                    f"{100 * np.mean(v):.1f} ({100 * np.std(v, ddof=len(v) > 1):.1f})" if v else "-"
                    for v in cells
                ]
                print(f"{name:14}{runs:>5}" + "".join(f"{text:>13}" for text in texts))
        print(verdict(done, task))


def _values(done: list[dict[str, Any]], task: str, method: str, column: str) -> list[float]:
    found = [line["test"] for line in done if (line["task"], line["method"]) == (task, method)]
    return [test[column] for test in found if column in test]


def verdict(done: list[dict[str, Any]], task: str) -> str:
    """Whether mirror descent is best at the small sizes, beyond chance (Welch, 95 %)."""
    from scipy.stats import ttest_ind

    single = [n for n, m in METHODS.items() if m.sized and not m.per_size and n != "mirror"]
    failed = []
    for size in SMALL:
        ours = _values(done, task, "mirror", f"{size:g}")
        for other in single:
            theirs = _values(done, task, other, f"{size:g}")
            if len(ours) < 2 or len(theirs) < 2:
                return "verdict: open (runs are missing)"
            better = np.mean(ours) > np.mean(theirs)
            sure = ttest_ind(ours, theirs, equal_var=False, alternative="greater").pvalue < 0.05  # pyright: ignore[reportAttributeAccessIssue]
            if not (better and sure):
                failed.append(f"{other} at {size:.2%}")
    if failed:
        return f"verdict: not best at small sizes; not beaten beyond chance: {', '.join(failed)}"
    return "verdict: best at small sizes among methods with one training run"


def merge(options: argparse.Namespace) -> None:
    """Tune three tasks from one base, merge the changes, and score each task with its own head."""
    tasks = ("trec", "sst2", "subj")
    done = lines(options.results)
    for name in ("mirror", "adamw"):
        parts: list[tuple[Bench, PretrainedClassifier, Patch]] = []
        for task in tasks:
            setting = chosen(task, name, done) or METHODS[name].settings[1]
            bench = Bench(task, 0, options.texts)
            model, matrices = train(bench, name, setting, None)
            total = sum(w.numel() for w in matrices.values())
            # AdamW's changes are kept as TIES merging does, a fifth of them; ours, a thousandth.
            count = round((0.001 if name == "mirror" else 0.2) * total)
            parts.append((bench, model, patch_of(model, model.tuned_state(), count)))
        for how in ("sum", "mean", "ties"):
            merged = Patch.merge([patch.without("head.*") for *_, patch in parts], how)
            scores = []
            for bench, model, _ in parts:
                state = {n: t.clone() for n, t in model.base.items()}
                merged.apply(state)
                head = {f"head.{n}": t for n, t in model.head.state_dict().items()}
                model.load_tuned(state | head)
                scores.append(accuracy(model, bench.sets.test))
            print(
                f"{name:8}{how:6}"
                + "".join(f"{t:>8} {s:.1%}" for t, s in zip(tasks, scores, strict=True))
            )


def step(options: argparse.Namespace) -> None:
    """Milliseconds and bytes a weight of one step, for a matrix of 10.6 M weights."""
    for name in ("AdamW, fused", "AdamW, foreach", "centred, p = 1.1"):
        weight = nn.Parameter(torch.randn(3072, 3456))
        weight.grad = torch.randn_like(weight)
        if name.startswith("AdamW"):
            optimizer: Optimizer = AdamW(
                [weight], 1e-4, fused="fused" in name, foreach="foreach" in name
            )
        else:
            optimizer = MirrorAdam([weight], 0.5, p=1.1, center="init", steps=100)
        optimizer.step()
        times = []
        for _ in range(10):
            began = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - began)
        state = sum(t.nbytes for t in optimizer.state[weight].values() if isinstance(t, Tensor))
        print(
            f"{name:18}{1e3 * float(np.median(times)):8.1f} ms {state / weight.numel():6.1f} bytes"
        )


def theory(options: argparse.Namespace) -> None:
    """Distance between the limit of centred mirror descent and the closest point that fits."""
    for p in (1.1, 1.5, 2.0):
        print(f"p = {p}: relative distance {closest_point_error(p):.2e}")


def closest_point_error(p: float, steps: int = 200_000) -> float:
    """Centred mirror descent on A w = b with 5 rows and 20 weights, against cvxpy's solution."""
    import cvxpy

    from mirrorhead.potentials import PNorm

    rng = np.random.default_rng(0)
    A, w0 = rng.normal(size=(5, 20)), rng.normal(size=20)
    b = A @ w0 + rng.normal(size=5)
    x = cvxpy.Variable(20)
    objective = cvxpy.Minimize(cvxpy.pnorm(x, p))  # pyright: ignore[reportArgumentType]
    cvxpy.Problem(objective, [A @ x == b - A @ w0]).solve()
    assert x.value is not None
    rows, target = torch.from_numpy(A), torch.from_numpy(b - A @ w0)
    potential, dual = PNorm(p), torch.zeros(20, dtype=torch.float64)
    rate = 0.5 * (p - 1) / float(torch.linalg.matrix_norm(rows, 2) ** 2)
    for _ in range(steps):
        residual = rows @ potential.inverse(dual) - target
        if float(residual.abs().max()) < 1e-10:
            break
        dual -= rate * (rows.T @ residual)
    found = potential.inverse(dual).numpy()
    return float(np.linalg.norm(found - x.value) / np.linalg.norm(x.value))


Link = Callable[[Tensor, float], Tensor]


def lp_link(p: float) -> Link:
    """The link of (1/p)||w - w0||_p^p up to the reach, and of degree 1 beyond."""

    def link(u: Tensor, reach: float) -> Tensor:
        scale = u.abs().max().clamp(min=reach)
        return scale * u.sign() * (u.abs() / scale) ** (1 / (p - 1))

    return link


def soft_link(threshold: float) -> Link:
    """Soft threshold: only a dual variable beyond the threshold moves its weight."""
    return lambda u, reach: torch.nn.functional.softshrink(u, threshold)


def sinh_link(scale: float) -> Link:
    """Hyperbolic entropy: linear below `scale`, exponential above."""
    return lambda u, reach: scale * torch.sinh((u / scale).clamp(-30, 30))


class CenteredAdam(Optimizer):
    """Adam's direction in the dual of any potential that is centred at the first weights w0.

    u <- u - (lr / steps) d,    w = w0 + link(u, reach),    the reach being lr at the start.
    With `lp_link` this is `MirrorAdam(center="init")`, written plainly.

    Args:
        params: the weights to tune.
        lr: the reach.
        link: from u and the reach to w - w0.
        steps: the sum of the schedule.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        link: Link,
        *,
        steps: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "reach": lr, "steps": steps, "betas": betas, "eps": eps}
        super().__init__(params, defaults)
        self.link = link

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["center"] = weight.detach().clone()
                    for name in ("dual", "exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(weight, dtype=torch.float32)
                    state["step"] = 0
                state["step"] += 1
                grad = weight.grad.float()
                mean = state["exp_avg"].lerp_(grad, 1 - beta1)
                square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                rate = group["lr"] / group["steps"] / (1 - beta1 ** state["step"])
                dual = state["dual"].addcdiv_(mean, root, value=-rate)
                change = self.link(dual, group["reach"])
                # A change that rounds away leaves the bits of w0, a zero's sign included.
                moved = (state["center"].float() + change).to(weight.dtype)
                weight.copy_(torch.where(moved == state["center"], state["center"], moved))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    actions = {"run": run_all, "table": table, "merge": merge, "step": step, "theory": theory}
    parser.add_argument("action", choices=actions)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to append to")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=(*TASKS, "imdb"))
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds of the chosen setting")
    parser.add_argument("--limit", type=int, help="stop after this many runs")
    parser.add_argument("--texts", type=int, help="training texts, for a quick look")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    actions[options.action](options)


if __name__ == "__main__":
    main()
