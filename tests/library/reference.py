"""The optimizers as their formulas, in float64: what every implementation must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mirror(w: Tensor, p: float) -> Tensor:
    return w.sign() * w.abs() ** (p - 1)


def inverse(u: Tensor, p: float) -> Tensor:
    return u.sign() * u.abs() ** (1 / (p - 1))


def knee_mirror(w: Tensor, p: float, knee: float) -> Tensor:
    """The mirror map of |w|^p/p up to |w| = knee, and of a parabola beyond."""
    line = knee ** (p - 1) + (p - 1) * knee ** (p - 2) * (w.abs() - knee)
    return w.sign() * torch.where(w.abs() <= knee, w.abs() ** (p - 1), line)


def knee_inverse(u: Tensor, p: float, knee: float) -> Tensor:
    line = knee + (u.abs() - knee ** (p - 1)) / ((p - 1) * knee ** (p - 2))
    return u.sign() * torch.where(u.abs() <= knee ** (p - 1), u.abs() ** (1 / (p - 1)), line)


def descend(
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],  # [step][tensor]
    lr: float,
    geometry: float,
    momentum: float = 0,
    weight_decay: float = 0,
    normalize: str | None = None,
    nesterov: bool = False,
    maximize: bool = False,
) -> list[Tensor]:
    p, q = geometry, geometry / (geometry - 1)
    u = [mirror(w.double(), p) for w in weights]
    m = [torch.zeros_like(x) for x in u]
    for gs in gradients:
        gs = [-g.double() if maximize else g.double() for g in gs]
        norms = [torch.linalg.vector_norm(g, q) for g in gs]
        if normalize == "global":
            norms = [torch.linalg.vector_norm(torch.stack(norms), q)] * len(gs)
        for i, g in enumerate(gs):
            if normalize and norms[i] > 0:
                g = g / norms[i]
            m[i] = momentum * m[i] + g
            d = g + momentum * m[i] if nesterov else m[i]
            u[i] = (1 - lr * weight_decay) * u[i] - lr * d
    return [inverse(x, p) for x in u]


def adam(
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    lr: float,
    geometry: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0,
    knee: float | None = 1.0,
    maximize: bool = False,
) -> list[Tensor]:
    result, p = [], geometry
    rms_floor = 1e-8 if p < 2 else 1e-2
    for i, w in enumerate(weights):
        rms = max(float(w.double().square().mean().sqrt()), rms_floor) if w.numel() else 1.0
        its_knee = 1.0 if rms < 1e-3 else knee
        bend = None if its_knee is None or p >= 2 else its_knee * rms
        u = mirror(w.double(), p) if bend is None else knee_mirror(w.double(), p, bend)
        m, v = 0.0, 0.0
        for k, gs in enumerate(gradients, start=1):
            g = -gs[i].double() if maximize else gs[i].double()
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            d = (m / (1 - betas[0] ** k)) / ((v / (1 - betas[1] ** k)).sqrt() + eps)
            u = (1 - lr * weight_decay) * u - lr * (p - 1) * rms ** (p - 2) * d
        result.append(inverse(u, p) if bend is None else knee_inverse(u, p, bend))
    return result


def centered(
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    geometry: float,
    reach: float,
    lr: float,
    centers: Sequence[Tensor] | None = None,
    betas: tuple[float, float] | None = None,
    weight_decay: float = 0,
) -> list[Tensor]:
    """Centred mirror descent, or with `betas` centred Adam; lr is the step of u."""
    result, p = [], geometry
    for i, w in enumerate(weights):
        w0 = (w if centers is None else centers[i]).double()
        x = w.double() - w0
        scale = max(reach, float(x.abs().max())) if x.numel() else reach
        u, m, v = scale * mirror(x / scale, p), 0.0, 0.0
        for k, gs in enumerate(gradients, start=1):
            d = gs[i].double()
            if betas is not None:
                m = betas[0] * m + (1 - betas[0]) * d
                v = betas[1] * v + (1 - betas[1]) * d**2
                d = (m / (1 - betas[0] ** k)) / ((v / (1 - betas[1] ** k)).sqrt() + 1e-8)
            u = (1 - lr * weight_decay) * u - lr * d
            scale = max(reach, float(u.abs().max())) if u.numel() else reach
        result.append(w0 + scale * inverse(u / scale, p))
    return result
