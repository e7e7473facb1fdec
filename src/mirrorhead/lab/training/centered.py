"""Adam's direction in the dual of a potential centred at the pretrained weights w0.

The reference for `MirrorAdam(center=...)`, and the other mirror maps of the field with the same
step, for comparison. With d = m / (sqrt(v) + eps) bias-corrected, R the reach and n the sum of
the schedule:

    u <- u - (lr / n) d,    w = w0 + link(u),    lr = R times the schedule

    lp:     S sign(u) |u / S|^(1/(p-1)),  S = max(R, max |u|)
    soft:   sign(u) max(|u| - threshold, 0)         (linearised Bregman, AdaBreg)
    sinh:   b sinh(u / b)                           (hyperbolic entropy)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

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
    """See the module. Parameters start at w0.

    Args:
        params: the weights to tune.
        lr: the reach R.
        p: exponent, if `link` is not given.
        steps: n, the sum of the schedule.
        link: from u and R to w - w0.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        p: float = 1.1,
        steps: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        link: Link | None = None,
    ) -> None:
        defaults = {"lr": lr, "reach": lr, "steps": steps, "betas": betas, "eps": eps}
        super().__init__(params, defaults)
        self.link = link or lp_link(p)

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
