"""The problems on which optimizers are compared, by the seeds of their trials."""

from __future__ import annotations

import torch
from torch import Tensor

from mirrorhead import AttentionProblem, Gradient, LinearProblem
from mirrorhead.losses import get_loss
from mirrorhead.synthetic import on_sphere, random_problem, random_weights

Pair = tuple[Tensor, Tensor]


def attention(trials: int, first: int) -> tuple[AttentionProblem, None]:
    """One layer of attention from W = 0."""
    return random_problem(trials, first=first), None


def factored(trials: int, first: int) -> tuple[AttentionProblem, Pair]:
    """The same with W = K Q', from small random factors."""
    problem = random_problem(trials, first=first)
    return problem, tuple(random_weights(problem, 0.1, first + (1 << k)) for k in (28, 29))  # pyright: ignore


def linear(trials: int, first: int) -> tuple[LinearProblem, None]:
    """Four classes of 16 random features, separable because there are only 12 samples."""
    features = [
        on_sphere((12, 16), torch.Generator().manual_seed(first + k)) for k in range(trials)
    ]
    labels = torch.arange(12) % 4
    return LinearProblem(torch.stack(features), labels.expand(trials, 12)), None


def binary(trials: int, first: int) -> tuple[LinearProblem, None]:
    """Two classes of 20 random features, 12 samples."""
    features = [
        on_sphere((12, 20), torch.Generator().manual_seed(first + k)) for k in range(trials)
    ]
    labels = 1 - 2 * (torch.arange(12) % 2)
    return LinearProblem(torch.stack(features), labels.expand(trials, 12)), None


def network(trials: int, first: int) -> tuple[TwoLayers, None]:
    """A network of two layers without biases, 16 hidden units, on 12 samples of 10 features."""
    drawn = _generators(trials, first)
    features = torch.stack([on_sphere((12, 10), each) for each in drawn])
    starts = {
        "first": torch.stack([on_sphere((16, 10), each) for each in drawn]),
        "second": torch.stack([on_sphere((1, 16), each) for each in drawn]),
    }
    labels = (1 - 2 * (torch.arange(12) % 2)).to(features).expand(trials, 12)
    return TwoLayers(features, labels, starts), None


def _generators(trials: int, first: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + k) for k in range(trials)]


class TwoLayers:
    """f(x) = sum_j a_j relu(w_j'x), homogeneous of degree 2, with the logistic loss."""

    def __init__(self, features: Tensor, labels: Tensor, starts: dict[str, Tensor]) -> None:
        self.features, self.labels, self.starts = features, labels, starts

    @property
    def trials(self) -> tuple[int, ...]:
        return tuple(self.features.shape[:-2])

    @property
    def samples(self) -> int:
        return self.features.shape[-2]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"features": self.features, "labels": self.labels, **self.starts}

    def start(self) -> dict[str, Tensor]:
        return self.starts

    def part(self, samples: list[int]) -> TwoLayers:
        return TwoLayers(self.features[..., samples, :], self.labels[..., samples], self.starts)

    def margins(self, weights: dict[str, Tensor]) -> Tensor:
        """y_i f(x_i), (..., n)."""
        hidden = (self.features @ weights["first"].mT).relu()
        return self.labels * (hidden @ weights["second"].mT).squeeze(-1)

    def gradients(self, weights: dict[str, Tensor]) -> dict[str, Gradient]:
        """The gradients in both layers, with one logarithm of their scale for each trial."""
        before = self.features @ weights["first"].mT  # (..., n, hidden)
        outputs = (before.relu() @ weights["second"].mT).squeeze(-1)
        log_slope = get_loss("logistic").log_slope(self.labels * outputs)
        largest = log_slope.amax(-1, keepdim=True)
        pull = (-(log_slope - largest).exp() * self.labels / self.samples).unsqueeze(-1)
        second = pull.mT @ before.relu()
        first = ((before > 0) * pull * weights["second"]).mT @ self.features
        scale = largest.squeeze(-1)
        return {"first": Gradient(first, scale, 2), "second": Gradient(second, scale, 2)}

    def log_loss(self, weights: dict[str, Tensor]) -> Tensor:
        """The logarithm of the size of the slopes, which is that of the loss once it is small."""
        slopes = get_loss("logistic").log_slope(self.margins(weights))
        return slopes.logsumexp(-1) - torch.tensor(float(self.samples)).log()
