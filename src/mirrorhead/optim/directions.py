"""Directions of a step, from the gradient: pure functions, which update the moments in place."""

from __future__ import annotations

from torch import Tensor


def momentum(g: Tensor, m: Tensor, decay: float, nesterov: bool = False) -> Tensor:
    """Return m <- decay m + g, or g + decay m with Nesterov's."""
    m.mul_(decay).add_(g)
    return g.add(m, alpha=decay) if nesterov else m


def adam(
    g: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float, eps: float, count: float
) -> Tensor:
    """Return m/(1 - beta1^t) / (sqrt(v/(1 - beta2^t)) + eps), t = `count`, after this gradient."""
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = v.sqrt().mul_((1 - beta2**count) ** -0.5).add_(eps)
    return (m / root).mul_(1 / (1 - beta1**count))
