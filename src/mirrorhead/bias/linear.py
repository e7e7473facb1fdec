r"""A linear model on separable data, with a gradient that is exact when the loss is 1e-1000.

With the margins m_i = y_i w'x_i and the loss (1/n) sum_i l(m_i), the gradient is
-(1/n) sum_i -l'(m_i) y_i x_i. For classes, with the outputs W x_i and cross-entropy, it is
(1/n) sum_i (p_i - e_{y_i}) x_i'. The slopes are kept as logarithms, so the direction stays
accurate at any size.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrorhead._checks import as_floats, as_tensor, check_signs
from mirrorhead.losses import get_loss
from mirrorhead.problem import Gradient, cross_entropy_slope

NEAR_ONE = 1 - 2.0**-53


@dataclass(frozen=True, eq=False, repr=False)
class LinearProblem:
    """Linear classification, for `follow`; leading dimensions are trials.

    Args:
        features: (..., n, d).
        labels: (..., n), +1 and -1 for weights (..., d), or integers 0, 1, ... for weights
            (..., classes, d) and cross-entropy.
        loss: "logistic" or "exponential", for labels +1 and -1.

    >>> problem = LinearProblem([[2.0, 0.0], [0.0, 1.0]], [1, -1])
    >>> problem
    LinearProblem(trials=(), n=2, d=2, logistic)
    >>> gradient = problem.gradients({"W": torch.tensor([1000.0, -1000.0])})["W"]
    >>> gradient.log_norm, gradient.direction
    (tensor(-1000.6931, dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))
    """

    features: Tensor
    labels: Tensor
    loss_name: str
    classes: int | None

    def __init__(self, features: Tensor, labels: Tensor, loss: str = "logistic") -> None:
        if loss not in ("logistic", "exponential"):
            raise ValueError(f"loss must be 'logistic' or 'exponential', got {loss!r}")
        features = as_floats("features", features)
        labels = as_tensor("labels", labels, features)
        if features.dim() < 2 or labels.shape != features.shape[:-1] or not labels.numel():
            given = tuple(features.shape), tuple(labels.shape)
            raise ValueError(f"features must be (..., n, d) and labels (..., n), got {given}")
        classes = None
        if not bool((labels < 0).any()) and bool((labels == 0).any()):
            if labels.is_floating_point() or labels.dtype == torch.bool:
                raise ValueError(f"labels of classes must be integers, got {labels.dtype}")
            if loss != "logistic":
                raise ValueError(f"loss must be 'logistic' with classes, got {loss!r}")
            classes = int(labels.max()) + 1
        else:
            check_signs("labels", labels, "; for classes give integers from 0")
        vars(self).update(features=features, labels=labels.to(features), loss_name=loss)
        vars(self).update(classes=classes)

    def __repr__(self) -> str:
        n, d = self.features.shape[-2:]
        classes = "" if self.classes is None else f", classes={self.classes}"
        return f"LinearProblem(trials={self.trials}, n={n}, d={d}, {self.loss_name}{classes})"

    @property
    def trials(self) -> tuple[int, ...]:
        """The leading dimensions."""
        return tuple(self.features.shape[:-2])

    @property
    def samples(self) -> int:
        """The number of samples of one trial."""
        return self.features.shape[-2]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """(..., d), or (..., classes, d)."""
        classes = () if self.classes is None else (self.classes,)
        return (*self.trials, *classes, self.features.shape[-1])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The data, by the names of the arguments."""
        return {"features": self.features, "labels": self.labels}

    def start(self) -> dict[str, Tensor]:
        """Weights of zero."""
        return {"W": self.features.new_zeros(self.weight_shape)}

    def part(self, samples: list[int]) -> LinearProblem:
        """The problem of these samples alone."""
        other = copy(self)
        some = {"features": self.features[..., samples, :], "labels": self.labels[..., samples]}
        vars(other).update(some)
        return other

    def gradients(self, weights: dict[str, Tensor]) -> dict[str, Gradient]:
        """The gradient of the training loss in W."""
        pull, log_slope = self._slopes(weights["W"])
        largest = log_slope.amax(-1, keepdim=True)
        share = (log_slope - largest).exp() / self.samples
        if self.classes is None:
            mantissa = ((pull * share).unsqueeze(-2) @ self.features).squeeze(-2)
        else:
            mantissa = (pull * share.unsqueeze(-1)).mT @ self.features
        return {"W": Gradient(mantissa, largest.squeeze(-1), 1 if self.classes is None else 2)}

    def log_loss(self, weights: dict[str, Tensor]) -> Tensor:
        """The logarithm of the training loss, (...), to first order where it is tiny."""
        _, log_slope = self._slopes(weights["W"])
        # For cross-entropy and the logistic loss, l = -log(1 - |l'|).
        if self.loss_name == "exponential":
            each = log_slope
        else:
            small = log_slope < -30
            safe = torch.where(small, -1.0, log_slope)
            each = torch.where(
                small, log_slope, (-torch.log1p(-safe.exp().clamp_max(NEAR_ONE))).log()
            )
        return each.logsumexp(-1) - math.log(self.samples)

    def _slopes(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """The slopes in the outputs over their size, (..., n) or (..., n, classes); its log."""
        if self.classes is not None:
            return cross_entropy_slope(self.features @ W.to(self.features).mT, self.labels)
        outputs = (self.features @ W.to(self.features).unsqueeze(-1)).squeeze(-1)
        return -self.labels, get_loss(self.loss_name).log_slope(self.labels * outputs)
