"""Ways to fine-tune an encoder so that few weights change, and what a patch of each size gives.

Centred MirrorAdam, AdamW with the largest changes, DARE, proximal l1, soft threshold, hyperbolic
entropy, LoRA, BitFit, and masks chosen beforehand. Every method trains the head, and none counts
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import AdamW, Optimizer

from mirrorhead import optim
from mirrorhead._files import write_atomically
from mirrorhead_lab.datasets import Splits, Texts
from mirrorhead_lab.models.pretrained import PretrainedClassifier
from mirrorhead_lab.training.tuning import TuneSets, TuneSettings, fine_tune, schedule


@dataclass(frozen=True)
class Bench:
    """A task with its texts encoded, and models as they come from the encoder's folder."""

    encoder: Path
    data: Splits[Texts]
    settings: TuneSettings

    @cached_property
    def sets(self) -> TuneSets:
        return TuneSets.of(self.data, self.encoder, self.settings)

    def model(self) -> PretrainedClassifier:
        torch.manual_seed(self.settings.seed)
        return PretrainedClassifier(self.encoder, len(self.data.classes))

    @property
    def full_steps(self) -> float:
        """The sum of the schedule: linear warm-up over a tenth, then linear decay."""
        count = len(self.sets.train) // self.settings.batch_size
        steps = self.settings.epochs * max(1, count)
        return sum(schedule(step, steps, self.settings.warmup) for step in range(steps))

    def tune(self, model: PretrainedClassifier, optimizer: Optimizer, after: Any = None) -> None:
        fine_tune(model, self.sets, self.settings, optimizer, after_step=after, validate=False)


#: Called after a step with the schedule's factor.
AfterStep = Callable[[float], None]
#: Trains AdamW's model at a rate, or returns it from where it was kept.
AdamWModel = Callable[[float], PretrainedClassifier]


def kept_or_trained(
    bench: Bench, file: Path, train: Callable[[], PretrainedClassifier]
) -> PretrainedClassifier:
    """Return the model of a file, or one that is trained now and kept there."""
    if file.exists():
        model = bench.model()
        model.load_tuned(model.base | load_file(file))
        return model
    model = train()
    base, tuned = model.base, model.tuned_state()
    changed = {n: t for n, t in tuned.items() if n not in base or not torch.equal(t, base[n])}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, save(changed))
    return model


def train(
    bench: Bench, method: str, setting: dict[str, float], adamw: AdamWModel | None = None
) -> PretrainedClassifier:
    """Fine-tune a fresh model by a method; `size` of a setting is that of a mask.

    adamw: needed by LT-SFT, which masks by the changes of AdamW at a rate of 1e-4.
    """
    model = bench.model()
    matrices = model.train_matrices()
    weights = list(matrices.values())
    after: AfterStep | None = None
    lr = setting.get("lr", 0.0)
    if method in ("mirror", "soft", "sinh", "adamw", "proximal"):
        optimizer, after = optimizer_of(bench, method, weights, setting)
    elif method in ("random-mask", "gradient-mask", "lt-sft"):
        masks = _masks(bench, method, matrices, setting["size"], adamw)
        for w, mask in zip(weights, masks, strict=True):
            w.register_hook(lambda grad, mask=mask: grad * mask)
        optimizer = AdamW(weights, lr, weight_decay=0.0, fused=True)
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
    return model


def optimizer_of(
    bench: Bench, method: str, weights: list[nn.Parameter], setting: dict[str, float]
) -> tuple[Optimizer, AfterStep | None]:
    """Return the optimizer of a method that trains all matrices, and what follows each step."""
    lr = setting.get("lr", 0.0)
    if method == "mirror":
        full = bench.full_steps  # counted whole, as in the stored results: undo the cap
        total = max(full, (full / 8) ** 2)
        reach = setting["reach"]
        return optim.CenteredAdam(weights, setting["p"], reach=reach, total_steps=total), None
    if method in ("soft", "sinh"):
        link = soft_link(setting["threshold"]) if method == "soft" else sinh_link(setting["scale"])
        return CenteredAdam(weights, lr, link), None
    after = _proximal_step(weights, lr * setting["l1"]) if method == "proximal" else None
    return AdamW(weights, lr, weight_decay=0.0, fused=True), after


def _proximal_step(weights: list[nn.Parameter], threshold: float) -> Callable[[float], None]:
    """After a step of AdamW: soft(w - w0, threshold), w0 being the weights now."""
    start = [w.detach().clone() for w in weights]

    def after(factor: float) -> None:
        with torch.no_grad():
            for w, w0 in zip(weights, start, strict=True):
                w.copy_(w0 + nn.functional.softshrink(w - w0, factor * threshold))

    return after


def _masks(
    bench: Bench,
    method: str,
    matrices: dict[str, nn.Parameter],
    size: float,
    adamw: AdamWModel | None,
) -> list[Tensor]:
    """A mask for each matrix with `size` of all weights: drawn, by gradient, or by a first run."""
    weights = list(matrices.values())
    count = round(size * sum(w.numel() for w in weights))
    if method == "random-mask":
        generator = torch.Generator().manual_seed(bench.settings.seed)
        scores = [torch.rand(w.shape, generator=generator) for w in weights]
    elif method == "lt-sft":
        assert adamw is not None
        first = adamw(1e-4).train_matrices()
        scores = [(w.detach() - first[name].detach()).abs() for name, w in matrices.items()]
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


def identical(base: dict[str, Tensor], tuned: dict[str, Tensor]) -> dict[str, float]:
    """Share of the weights of changed matrices that keep their bits, in float32 and in bf16."""
    names = [n for n, t in base.items() if t.ndim == 2 and not torch.equal(t, tuned[n])]
    if not names:  # BitFit: no matrix has changed
        return {"F32": 1.0, "BF16": 1.0}
    total = sum(base[n].numel() for n in names)
    same = sum(int((base[n] == tuned[n]).sum()) for n in names)
    half = sum(int((base[n].bfloat16() == tuned[n].bfloat16()).sum()) for n in names)
    return {"F32": same / total, "BF16": half / total}


def dare(
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
    With `lp_link` this is `mirrorhead.CenteredAdam`, written plainly.

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
