r"""One layer of softmax attention, with a gradient that is accurate when attention is one-hot.

The model is f(X, z) = v' X' s(X W z) with s the softmax, and the training loss
L(W) = (1/n) sum_i l(y_i f(X_i, z_i)). With scores a_t = y v' x_t and logits h = X W z the
gradient of one sample with respect to its logits is l'(y f) s_t (a_t - sum_tau s_tau a_tau).

During training s tends to a one-hot vector, and the bracket cancels. In floating point the
direction of the plain formula is noise once its size is near 1e-16. Here all quantities are
relative to the selected token alpha, the one with the largest logit. With
r_t = h_t - h_alpha, m the largest r_t of the others, and e_t = exp(r_t - m),

    s_alpha = 1 / (1 + exp(m) sum e),     s_t = s_alpha exp(m) e_t,
    D       = sum_t s_t (a_alpha - a_t) = exp(m) D',   D' = s_alpha sum_t e_t (a_alpha - a_t),
    dL/dh_t = l' s_alpha exp(m) e_t (exp(m) D' - (a_alpha - a_t))     for t other than alpha,

and the entry of alpha is minus the sum of the others. Only numbers of size one are added;
l', s_alpha and exp(m) are kept as logarithms. The margin is y f = a_alpha - exp(m) D'.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrorhead._checks import as_floats, as_tensor, check_data, check_signs
from mirrorhead.geometry import Norm, PNorm
from mirrorhead.geometry._powers import check_exponent, expand, lp_norm
from mirrorhead.losses import Logistic, Loss, get_loss


@dataclass(frozen=True, eq=False)
class Gradient:
    """A gradient as `mantissa * exp(log_scale)`, one scale for each trial.

    dims: how many of the last dimensions belong to the parameter; the others are trials.
    mass: (...), for a gradient in W: the sum of |dL/dh_it| over all tokens except the selected
    ones, in units of exp(log_scale). Where attention is nearly one-hot on the best tokens, `mass`
    approximates the remaining excess loss, and `gradient / mass` the gradient of its logarithm.
    """

    mantissa: Tensor
    log_scale: Tensor
    dims: int
    mass: Tensor | None = None

    @property
    def _dims(self) -> tuple[int, ...]:
        return tuple(range(-self.dims, 0))

    def normalized(self, q: float) -> Tensor:
        """The gradient divided by its q-norm, 1 <= q <= inf; zero where the gradient is zero."""
        norm = lp_norm(self.mantissa, check_exponent(q, "q"), self._dims, keepdim=True)
        return self.mantissa / norm.where(norm > 0, 1)

    def divided_by_dual(self, norm: Norm) -> Tensor:
        """The gradient divided by its dual norm; zero where the gradient is zero."""
        size = expand(norm.dual_norm(self.mantissa, self._dims), self.mantissa, self._dims)
        return self.mantissa / size.where(size > 0, 1)

    def steepest(self, norm: Norm) -> Tensor:
        """The direction of norm 1 in which the loss grows fastest."""
        return norm.of_each("steepest", self.mantissa, self._dims)

    def log_norm_of(self, q: float) -> Tensor:
        """The logarithm of the q-norm, (...); -inf for a zero gradient."""
        return lp_norm(self.mantissa, check_exponent(q, "q"), self._dims).log() + self.log_scale

    @property
    def direction(self) -> Tensor:
        """The gradient over its Frobenius norm; zero where the gradient is zero."""
        return self.normalized(2)

    @property
    def log_norm(self) -> Tensor:
        """The logarithm of the Frobenius norm, (...): finite long after `value` is zero."""
        return self.log_norm_of(2)

    @property
    def value(self) -> Tensor:
        """The plain tensor, which underflows to zero where the gradient is below 1e-308."""
        return self.mantissa * self.log_scale.exp().reshape(self.log_scale.shape + (1,) * self.dims)


@dataclass(frozen=True, eq=False, repr=False)
class AttentionProblem:
    """Data and head of a one-layer attention classifier; leading dimensions are trials.

    Args:
        X: tokens, (..., n, T, d).
        z: queries, (..., n, d); or of another width c, and W is then (..., d, c).
        y: labels +1 or -1, (..., n); with `classes`, integers 0 ... classes - 1.
        v: the linear head, (..., d); with `heads` and `classes`, (..., heads, classes, d)
            without the dimensions that are not asked for.
        loss: "logistic", "exponential", "linear" or a `Loss` of your own; with `classes`,
            cross-entropy.
        mask: (..., n, T) bool, False at padding.
        heads: the number of heads. f is their sum, each with its own W and v, and W is then
            (..., heads, d, d).
        classes: the number of classes where there are more than two outcomes.
        scores: (..., n, T), in place of y_i v' x_it, for one head and labels +1 and -1. v then
            has no meaning and cannot be trained.

    Everything is computed in float64. Padding may hold anything, even NaN.

    >>> X = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])
    >>> problem = AttentionProblem(X, z=X[:, 0], y=[1.0], v=[1.0, 1.0])
    >>> W = torch.tensor([[500.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    >>> gradient = problem.gradient(W)
    >>> gradient.value.abs().max(), gradient.log_norm
    (tensor(0., dtype=torch.float64), tensor(-2000.6291, dtype=torch.float64))
    >>> gradient.direction
    tensor([[-0.8944,  0.0000],
            [ 0.4472,  0.0000]], dtype=torch.float64)
    """

    X: Tensor
    z: Tensor
    y: Tensor
    v: Tensor
    loss_function: Loss
    mask: Tensor | None
    heads: int | None
    classes: int | None
    given_scores: Tensor | None

    def __init__(
        self,
        X: Tensor,
        z: Tensor,
        y: Tensor | list[float],
        v: Tensor | list[float],
        loss: str | Loss = "logistic",
        mask: Tensor | None = None,
        heads: int | None = None,
        classes: int | None = None,
        scores: Tensor | None = None,
    ) -> None:
        loss_function = get_loss(loss)
        X, z, mask = check_data(X, z, mask)
        if 0 in X.shape:
            raise ValueError(f"X must be (..., n, T, d) and not empty, got {tuple(X.shape)}")
        if mask is not None and not bool(mask.any(-1).all()):
            raise ValueError("mask must keep at least one token of every sample")
        for name, count, least in (("heads", heads, 1), ("classes", classes, 2)):
            if count is not None and (type(count) is not int or count < least):
                raise ValueError(f"{name} must be None or an integer >= {least}, got {count!r}")
        if classes is not None and type(loss_function) is not Logistic:
            raise ValueError(f"loss must be 'logistic' with classes, got {loss!r}")
        trials, n, d = X.shape[:-3], X.shape[-3], X.shape[-1]
        head = tuple(size for size in (heads, classes) if size is not None)
        y = as_floats("y", y, X, (*trials, n))
        v = as_floats("v", v, X, (*trials, *head, d))
        if classes is None:
            check_signs("y", y, "; for class numbers give classes")
        if classes is not None and not bool(((y == y.round()) & (y >= 0) & (y < classes)).all()):
            raise ValueError(f"y must be integers from 0 to {classes - 1} with classes={classes}")
        if scores is not None:
            if head:
                raise ValueError(
                    "problem must have one head and labels +1 and -1 where scores are given, got"
                    f" heads={heads}, classes={classes}"
                )
            scores = as_tensor("scores", scores, X).to(torch.float64)
            if mask is not None and scores.shape == mask.shape:
                scores = scores.masked_fill(~mask, 0.0)
            scores = as_floats("scores", scores, X, tuple(X.shape[:-1]))
        vars(self).update(X=X, z=z, y=y, v=v, mask=mask, given_scores=scores)
        vars(self).update(loss_function=loss_function, heads=heads, classes=classes)

    def __repr__(self) -> str:
        n, T, d = self.X.shape[-3:]
        heads = "" if self.heads is None else f", heads={self.heads}"
        classes = "" if self.classes is None else f", classes={self.classes}"
        masked = "" if self.mask is None else ", masked"
        scores = "" if self.given_scores is None else ", given scores"
        sizes = f"trials={self.trials}, n={n}, T={T}, d={d}"
        return (
            f"AttentionProblem({sizes}, {self.loss_function.name}{heads}{classes}{masked}{scores})"
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that define the problem, by the names of the arguments."""
        named = {name: getattr(self, name) for name in ("X", "z", "y", "v", "mask")}
        named["scores"] = self.given_scores
        return {name: x for name, x in named.items() if x is not None}

    @property
    def options(self) -> dict[str, Any]:
        """The other arguments: together with `tensors` they are the whole problem."""
        return {"loss": self.loss_function, "heads": self.heads, "classes": self.classes}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> AttentionProblem:
        """Return the problem with a change of its leading dimensions, made to every tensor of it.

        >>> X = torch.ones(5, 1, 2, 3)
        >>> problem = AttentionProblem(X, X[..., 0, :], torch.ones(5, 1), torch.ones(5, 3))
        >>> problem.mapped(lambda x: x.unsqueeze(0))
        AttentionProblem(trials=(1, 5), n=1, T=2, d=3, logistic)
        """
        tensors: dict[str, Any] = {name: change(x) for name, x in self.tensors.items()}
        return AttentionProblem(**tensors, **self.options)

    @property
    def trials(self) -> tuple[int, ...]:
        """The leading dimensions."""
        return tuple(self.X.shape[:-3])

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """(..., d, d), or (..., heads, d, d); the last d is the width of z."""
        heads = () if self.heads is None else (self.heads,)
        return (*self.trials, *heads, self.X.shape[-1], self.z.shape[-1])

    @property
    def weight_dims(self) -> int:
        """How many of the last dimensions of W are not trials: 2, or 3 with heads."""
        return 2 if self.heads is None else 3

    @property
    def head_dims(self) -> int:
        """How many of the last dimensions of v are not trials."""
        return 1 + (self.heads is not None) + (self.classes is not None)

    def with_head(self, v: Tensor) -> AttentionProblem:
        """The same data with another head v, of the shape of the present one."""
        check_problem(self, head=True)
        v = as_tensor("v", v, self.X).to(torch.float64)  # JointGD calls this at every step
        if v.shape != self.v.shape:
            raise ValueError(f"v must have shape {tuple(self.v.shape)}, got {tuple(v.shape)}")
        other = copy(self)
        vars(other).update(v=v)
        vars(other).pop("_values", None)
        return other

    def with_scores(self, scores: Tensor) -> AttentionProblem:
        """The same problem with the argument `scores`.

        >>> X = torch.ones(1, 2, 3)
        >>> problem = AttentionProblem(X, X[:, 0], [1.0], torch.zeros(3))
        >>> problem.with_scores(torch.tensor([[0.0, 1.0]])).scores()
        tensor([[0., 1.]], dtype=torch.float64)
        """
        tensors: dict[str, Any] = {**self.tensors, "scores": scores}
        return AttentionProblem(**tensors, **self.options)

    def trial(self, index: int | slice) -> AttentionProblem:
        """One trial, or a slice of them, of a problem with one leading dimension.

        >>> X = torch.ones(5, 1, 2, 3)
        >>> AttentionProblem(X, X[..., 0, :], torch.ones(5, 1), torch.ones(5, 3)).trial(2)
        AttentionProblem(trials=(), n=1, T=2, d=3, logistic)
        """
        if len(self.trials) != 1:
            raise ValueError(f"trial needs one leading dimension, the problem has {self.trials}")
        return self.mapped(lambda x: x[index])

    def logits(self, W: Tensor) -> Tensor:
        """X W z, (..., n, T), or (..., heads, n, T); -inf at padding."""
        return self._heads_first(self._logits(self._weights(W)))

    def attention(self, W: Tensor) -> Tensor:
        """softmax(X W z), of the shape of `logits`."""
        return self.logits(W).softmax(-1)

    def select(self, W: Tensor) -> Tensor:
        """The token with the largest attention in each sample, (..., n) or (..., heads, n)."""
        return self.logits(W).argmax(-1)

    def margin(self, W: Tensor, tokens: Tensor) -> Tensor:
        """The least lead of the tokens' logits over those of other tokens, (...) or (..., heads).

        tokens: (..., n) or (..., heads, n). It is inf where no sample has another token.
        """
        logits, at = self.logits(W), tokens.unsqueeze(-1)
        if at.shape[:-1] != logits.shape[:-1]:
            given = tuple(tokens.shape)
            raise ValueError(f"tokens must have shape {tuple(logits.shape[:-1])}, got {given}")
        lead = logits.gather(-1, at) - logits
        return lead.scatter(-1, at, torch.inf).amin((-2, -1))

    def scores(self) -> Tensor:
        """y_i v' x_it, (..., n, T) or (..., heads, n, T): Definition 2, for two classes.

        Or the scores that were given, 0 at padding.
        """
        if self.classes is not None:
            raise ValueError("scores are defined for labels +1 and -1, not for classes")
        return self._heads_first(self._values[..., 0])

    def output(self, W: Tensor) -> Tensor:
        """f(X_i, z_i), (..., n), or (..., n, classes)."""
        attention = self._logits(self._weights(W)).softmax(-1)
        output = (attention.unsqueeze(-1) * self._values).sum((-3, -2))
        return output if self.classes is not None else output.squeeze(-1) * self.y

    def loss(self, W: Tensor) -> Tensor:
        """The training loss, (...); differentiable by autograd while attention is soft."""
        output = self.output(W)
        if self.classes is None:
            return self.loss_function.value(self.y * output).mean(-1)
        true = self.y.long().unsqueeze(-1)
        return -output.log_softmax(-1).gather(-1, true).squeeze(-1).mean(-1)

    def gradient(self, W: Tensor) -> Gradient:
        """The gradient of the loss in W, with its direction right at any size."""
        return self._weight_gradient(self._forward(self._weights(W)))

    def gradients(self, W: Tensor) -> tuple[Gradient, Gradient]:
        """The gradients in W and in the head v, from one pass."""
        check_problem(self, head=True)
        forward = self._forward(self._weights(W))
        return self._weight_gradient(forward), self._head_gradient(forward)

    def reach(self, norm: Norm) -> Tensor:
        """How far weights of norm one can move a logit from its sample's mean, (...).

        |(x_t - mean x)' W z| <= ||W|| ||(x_t - mean x) z'||_*; the largest over all tokens. For
        the p-norm, ||a b'||_q = ||a||_q ||b||_q.
        """
        kept = torch.ones_like(self.X[..., 0]) if self.mask is None else self.mask.to(self.X)
        kept = kept.unsqueeze(-1)  # (..., n, T, 1)
        centre = (self.X * kept).sum(-2, keepdim=True) / kept.sum(-2, keepdim=True)
        rows = (self.X - centre) * kept
        if isinstance(norm, PNorm):
            return (norm.dual_norm(rows, -1).amax(-1) * norm.dual_norm(self.z, -1)).amax(-1)
        outer = rows.unsqueeze(-1) * self.z[..., None, None, :]  # (..., n, T, d, c)
        return norm.dual_norm(outer, (-2, -1)).amax((-2, -1))

    # -- inside: heads stand between samples and tokens, (..., n, heads, T) ---------------

    @cached_property
    def _values(self) -> Tensor:
        """The output of each token for each class, times y for two classes: (..., n, h, T, c)."""
        if self.given_scores is not None:
            return self.given_scores[..., None, :, None]
        d = self.X.shape[-1]
        v = self.v.reshape(*self.trials, 1, self.heads or 1, self.classes or 1, d)
        values = torch.matmul(v, self.X.mT.unsqueeze(-3)).mT  # (..., n, h, T, c)
        return values if self.classes is not None else values * self.y[..., None, None, None]

    def _weights(self, W: Tensor) -> Tensor:
        """W in float64 with a dimension of heads, checked."""
        W = as_tensor("W", W, self.X).to(torch.float64)
        if W.shape != self.weight_shape:
            raise ValueError(f"W must have shape {self.weight_shape}, got {tuple(W.shape)}")
        return W if self.heads is not None else W.unsqueeze(-3)

    def _heads_first(self, x: Tensor) -> Tensor:
        """(..., n, heads, T) to (..., heads, n, T), or (..., n, T) where there is one."""
        return x.squeeze(-2) if self.heads is None else x.transpose(-3, -2)

    def _logits(self, W: Tensor) -> Tensor:
        # (..., heads, n, d) -> (..., n, heads, d) -> (..., n, heads, T)
        Wz = torch.matmul(self.z.unsqueeze(-3), W.mT).transpose(-3, -2)
        logits = Wz @ self.X.mT
        return (
            logits
            if self.mask is None
            else logits.masked_fill(~self.mask[..., None, :], -torch.inf)
        )

    def _forward(self, W: Tensor) -> _Forward:
        logits = self._logits(W)
        top, token = logits.max(-1, keepdim=True)
        others = (logits - top).scatter_(-1, token, -torch.inf)
        # A sample with one token has no others: the finite floor keeps -inf - -inf out.
        log_tail = others.amax(-1, keepdim=True).clamp_min(torch.finfo(others.dtype).min)
        rest = (others - log_tail).exp_()
        tail = log_tail.exp()
        excess = tail * rest.sum(-1, keepdim=True)  # (1 - s_alpha) / s_alpha
        selected = 1 / (1 + excess)
        if self.classes is None:
            scores = self._values.squeeze(-1)
            best = scores.gather(-1, token)
            gap = best - scores
            shortfall = selected * (rest * gap).sum(-1, keepdim=True)
            margin = (best - tail * shortfall).sum((-2, -1))
            log_slope = self.loss_function.log_slope(margin)
            weights = -self.y.unsqueeze(-1)
        else:
            values = self._values
            best = values.gather(-2, token.unsqueeze(-1).expand(*token.shape, self.classes))
            gaps = best - values  # (..., n, heads, T, classes)
            missing = tail * selected * (rest.unsqueeze(-2) @ gaps).squeeze(-2)
            output = (best.squeeze(-2) - missing).sum(-2)  # (..., n, classes)
            weights, log_slope = cross_entropy_slope(output, self.y)
            gap = -(gaps @ weights[..., None, :, None]).squeeze(-1)
            shortfall = selected * (rest * gap).sum(-1, keepdim=True)
        log_scale = log_slope.unsqueeze(-1) + (log_tail - excess.log1p()).squeeze(-1)
        return _Forward(token, rest, tail, selected, gap, shortfall, log_slope, log_scale, weights)

    def _weight_gradient(self, forward: _Forward) -> Gradient:
        _, rest, tail, _, gap, shortfall, _, log_scale, _ = forward
        pull = rest * (tail * shortfall - gap)  # (..., n, heads, T), 0 at the selected token
        largest = log_scale.amax((-2, -1), keepdim=True)
        share = (log_scale - largest).exp() / -self.X.shape[-3]
        mass = -(pull.abs().sum(-1) * share).sum((-2, -1))
        pull.scatter_(-1, forward.token, -pull.sum(-1, keepdim=True))
        rows = torch.matmul(pull * share.unsqueeze(-1), self.X)  # (..., n, heads, d)
        mantissa = torch.matmul(rows.movedim(-3, -1), self.z.unsqueeze(-3))
        mantissa = mantissa if self.heads is not None else mantissa.squeeze(-3)
        return Gradient(mantissa, largest[..., 0, 0], self.weight_dims, mass)

    def _head_gradient(self, forward: _Forward) -> Gradient:
        _, rest, tail, selected, _, _, log_slope, _, weights = forward
        attention = (rest * tail).scatter_(-1, forward.token, 1.0) * selected
        features = torch.matmul(attention, self.X)  # (..., n, heads, d)
        largest = log_slope.amax(-1, keepdim=True)
        share = (log_slope - largest).exp() / self.X.shape[-3]
        mantissa = torch.einsum("...nc,...nhd->...hcd", weights * share.unsqueeze(-1), features)
        return Gradient(mantissa.reshape(self.v.shape), largest.squeeze(-1), self.head_dims)


class _Forward(NamedTuple):
    """The quantities of the module's formula, (..., n, heads, T) or 1 in place of T."""

    token: Tensor  # alpha
    rest: Tensor  # e_t, 0 at alpha
    tail: Tensor  # exp(m)
    selected: Tensor  # s_alpha
    gap: Tensor  # a_alpha - a_t
    shortfall: Tensor  # D'
    log_slope: Tensor  # log -l', (..., n)
    log_scale: Tensor  # log(-l' s_alpha exp(m)), (..., n, heads)
    weights: Tensor  # dl/df over exp(log_slope), (..., n, classes or 1)


def cross_entropy_slope(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The slope of cross-entropy in the outputs as (weights, log of 1 - p_true).

    It is p_c - [c true]; over 1 - p_true that is -1 at the true class and the shares of
    the others, a softmax of their own, so nothing cancels as p_true tends to 1.
    """
    true = y.long().unsqueeze(-1)
    wrong = output.scatter(-1, true, -torch.inf)
    weights = wrong.softmax(-1).scatter(-1, true, -1.0)
    return weights, wrong.logsumexp(-1) - output.logsumexp(-1)


def check_problem(
    problem: AttentionProblem, plain: bool = False, head: bool = False
) -> AttentionProblem:
    """Return the problem, or raise an error.

    plain: it must have one head and labels +1 and -1. head: its scores must come from its v.
    """
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"problem must be an AttentionProblem, got {type(problem).__name__}")
    if plain and (problem.heads is not None or problem.classes is not None):
        raise ValueError(f"problem must have one head and labels +1 and -1, got {problem}")
    if head and problem.given_scores is not None:
        raise ValueError(f"problem must have the scores of its head v, got {problem}")
    return problem
