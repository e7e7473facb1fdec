"""How near the heads of a trained model are to the max-margin solutions of the theory.

For one layer of attention the paper proves that W, trained by mirror descent with exponent p, turns
to the lp-AttSVM solution W* of the tokens it selects. Here n texts are run through a trained model.
For each head, the tokens are those it attends to most, and

    margin of W  =  min over i, t of (x_i,sel - x_it)' W z_i / ||W||_p
    share        =  margin of W / margin of W*             1 exactly if W is a multiple of W*
    divergence   =  D(W*/||W*||, W/||W||), the Bregman divergence of |w|^p / p
    one-hotness  =  mean over texts of the largest attention weight

W itself selects its tokens, so the constraints always have a solution unless two tokens tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta, Struct
from torch import Tensor

from mirrorhead.geometry import PNorm
from mirrorhead.margin import attention_svm
from mirrorhead_lab.models.attention_maps import LayerHeads, Query, read_heads

PS = (1.1, 1.5, 2.0, 3.0)
#: Relative gap to which solutions are certified: the share has as many digits.
TOL = 1e-6
#: Queries that differ less than float32 can tell, relatively, are one query.
SAME = 1e-6


class Nearness(Struct, frozen=True):
    """One head against the solution of one exponent; numbers are None unless it is optimal."""

    p: float
    status: Literal["optimal", "infeasible", "unfinished"]
    gap: float | None = None
    share: float | None = None
    divergence: float | None = None


class HeadMargins(Struct, frozen=True):
    """One head: its one-hotness, and its nearness to the solution of each exponent."""

    layer: int
    head: int
    one_hot: Annotated[float, Meta(ge=0, le=1)]
    by_p: tuple[Nearness, ...]


class CheckpointMargins(Struct, frozen=True):
    """All heads at one moment of a run; a model that is not a run has no epoch."""

    name: str
    heads: tuple[HeadMargins, ...]
    epoch: int | None = None
    train_accuracy: float | None = None


class ModelMargins(Struct, frozen=True):
    """What `mirrorhead margins --json` prints: one model, along its checkpoints.

    Args:
        model: the name of its folder.
        optimizer, lr, p, seed: of the run; None for a model that is not a run.
        texts, tokens: numbers of texts, and of tokens of a text at most.
        text_seed: of the draw of the texts.
        query: whose attention is read.
    """

    model: str
    texts: int
    tokens: int
    query: Query | None
    checkpoints: Annotated[tuple[CheckpointMargins, ...], Meta(min_length=1)]
    optimizer: str | None = None
    lr: float | None = None
    p: float | None = None
    seed: int | None = None
    text_seed: int | None = None

    @property
    def last(self) -> CheckpointMargins:
        return self.checkpoints[-1]


@dataclass(frozen=True, eq=False)
class Batch:
    """n texts for a model: ids and mask (n, T), and what the model is called with if not `ids`."""

    ids: Tensor
    mask: Tensor
    named: dict[str, Tensor] | None = None


def measure_heads(
    model: torch.nn.Module,
    batch: Batch,
    ps: Sequence[float] = PS,
    query: Query | None = None,
    after: Callable[[], None] = lambda: None,
) -> tuple[HeadMargins, ...]:
    """Measure every head of every layer; `after` is called after each solution."""
    layers = read_heads(model, batch.ids, batch.mask, query, batch.named)
    return tuple(
        head_margins(layer, number, head, ps, after)
        for number, layer in enumerate(layers)
        for head in range(len(layer.W))
    )


def head_margins(
    layer: LayerHeads,
    number: int,
    head: int,
    ps: Sequence[float] = PS,
    after: Callable[[], None] = lambda: None,
) -> HeadMargins:
    """Measure one head against the solution of each exponent in `ps`."""
    largest, tokens = layer.attention[head].max(dim=-1)
    found = []
    for p in ps:
        found.append(_nearness(layer.W[head], layer, tokens, p))
        after()
    return HeadMargins(number, head, float(largest.mean()), tuple(found))


def _nearness(W: Tensor, layer: LayerHeads, tokens: Tensor, p: float) -> Nearness:
    psi = PNorm(p)
    X, z, mask = layer.X, layer.z, layer.mask
    # In a first layer the query has the same input in every text. W z is then one vector w, and
    # the W of least norm with W z = w is w c', where c is the unit vector of the p-norm with the
    # largest c' z. So d unknowns are enough instead of d^2.
    same = bool(((z - z[:1]).abs() <= SAME * z.abs().max()).all())
    query = z.new_full((len(z), 1), float(psi.dual_norm(z[0]))) if same else z
    solution = attention_svm(X, query, tokens, p, TOL, mask=mask)
    if solution.status != "optimal":
        gap = float(solution.gap)
        return Nearness(p, solution.status, gap if math.isfinite(gap) else None)
    best = solution.W
    if same:
        c = z[0].sign() * z[0].abs().pow(psi.q - 1)
        best = best @ (c / psi.norm(c))[None]
    logits = torch.einsum("ntd,dc,nc->nt", X, W, z)
    ahead = logits.gather(1, tokens[:, None]) - logits
    ahead = ahead.masked_fill(~mask, math.inf).scatter(1, tokens[:, None], math.inf)
    # W* has margin 1 over its norm.
    share = float(ahead.min() / psi.norm(W) * solution.norm)
    divergence = float(psi.direction_divergence(best, W))
    return Nearness(p, "optimal", float(solution.gap), share, divergence)


def mean_over_heads(
    found: CheckpointMargins, p: float, of: Callable[[Nearness], float | None]
) -> float | None:
    """Return the mean of a quantity over all heads that have one; None if no head has."""
    values = [of(one) for head in found.heads for one in head.by_p if one.p == p]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def exponents(found: Sequence[ModelMargins]) -> list[float]:
    """Return the exponents that any of the models was measured with."""
    return sorted({one.p for model in found for head in model.last.heads for one in head.by_p})
