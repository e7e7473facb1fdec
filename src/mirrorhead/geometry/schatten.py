"""The p-norm of singular values: the nuclear norm at p = 1, the spectral norm at p = inf."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mirrorhead._checks import check_integer
from mirrorhead.geometry._base import Norm, Potential
from mirrorhead.geometry._powers import Dims, in_wide
from mirrorhead.geometry.pnorm import PNorm, entry_divergence


class Schatten(Norm, Potential):
    r"""The Schatten norm :math:`\|W\|_{S_p} = (\sum_i \sigma_i^p)^{1/p}` of singular values.

    As a potential, psi(W) = (1/p) sum sigma^p for 1 < p < inf. With W = P diag(sigma) Q', the
    mirror map is P diag(sigma^(p-1)) Q'. Everything acts on matrices, which are the last two
    dimensions unless `dims` names others; the rest is a batch. Singular values below the rounding
    error of the largest one count as 0.

    Args:
        p: from 1 to inf.
        newton_schulz: for p = inf, compute `steepest` by this number of Newton-Schulz steps, 5 as
            in Muon, instead of a singular value decomposition: much faster on large matrices, and
            its singular values are about 0.7 to 1.2 instead of 1.

    >>> W = torch.diag(torch.tensor([3.0, -4.0]))
    >>> [float(Schatten(p).norm(W)) for p in (1, 2, math.inf)]
    [7.0, 5.0, 4.0]
    >>> Schatten(math.inf).steepest(W)
    tensor([[ 1.,  0.],
            [ 0., -1.]])
    """

    def __init__(self, p: float, newton_schulz: int = 0) -> None:
        self._entries = PNorm(p)  # of the singular values
        self.p, self.q = self._entries.p, self._entries.q
        self.newton_schulz = check_integer("newton_schulz", newton_schulz, 0)
        if newton_schulz and self.p != math.inf:
            raise ValueError(f"newton_schulz needs p = inf, got p = {self.p:g}")

    def __repr__(self) -> str:
        steps = f", newton_schulz={self.newton_schulz}" if self.newton_schulz else ""
        return f"Schatten({self.p:g}{steps})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schatten) and repr(other) == repr(self) and other.p == self.p

    def __hash__(self) -> int:
        return hash((Schatten, self.p))

    @property
    def limit(self) -> Norm:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self

    @property
    def dual(self) -> Schatten:
        return Schatten(self.q)

    def check(self, shape: torch.Size | tuple[int, ...], name: str = "w") -> None:
        if len(shape) != 2:
            raise ValueError(
                f"{name} must be a matrix for {self!r}, got shape {tuple(shape)}; use PNorm for"
                " vectors, or put them in a group of their own"
            )

    def norm(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return the p-norm of the singular values."""
        return in_wide(lambda x: self._entries.norm(_values(self._matrices(x, dims)), -1), w)

    def dual_norm(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return the q-norm of the singular values, q = p/(p-1)."""
        return in_wide(lambda x: self._entries.dual_norm(_values(self._matrices(x, dims)), -1), u)

    def steepest(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return P d Q', where d is the steepest direction of the singular values of u."""
        if self.newton_schulz:
            moved = _newton_schulz(self._matrices(u, dims), self.newton_schulz)
            return moved if dims is None else moved.movedim((-2, -1), dims)  # pyright: ignore
        return self._with_values(u, dims, lambda s: self._entries.steepest(s, -1))

    def mirror(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return P diag(sigma^(p-1)) Q'."""
        return self._with_values(w, dims, self._entries.mirror)

    def inverse(self, u: Tensor, dims: Dims = None) -> Tensor:
        """Return P diag(sigma^(1/(p-1))) Q'."""
        return self._with_values(u, dims, self._entries.inverse)

    def value(self, w: Tensor, dims: Dims = None) -> Tensor:
        """Return psi(W) = (1/p) sum sigma^p."""
        return in_wide(lambda x: self._entries.value(_values(self._matrices(x, dims)), -1), w)

    def divergence(self, w: Tensor, v: Tensor, dims: Dims = None) -> Tensor:
        """Return the Bregman divergence, as a sum of terms that are never negative.

        With W = sum a_i x_i y_i' and V = sum b_j u_j v_j', r = x_i'u_j and t = y_i'v_j, it is

            sum_ij (r^2 + t^2)/2 d(a_i, b_j) + sum_ij a_i b_j^(p-1) (r - t)^2 / 2,

        where d is the divergence of |x|^p/p. For it, matrices are padded with zeros to squares.
        """

        def of_matrices(w: Tensor, v: Tensor) -> Tensor:
            x, a, y = _svd(_square(self._matrices(w, dims)))
            u, b, z = _svd(_square(self._matrices(v, dims)))
            r, t = x.mT @ u, y @ z.mT  # (..., i, j)
            a, b = a[..., :, None], b[..., None, :]
            a, b = torch.broadcast_tensors(a, b)
            apart = entry_divergence(a, b, self.p)
            turned = a * self._entries.mirror(b) * (r - t).square() / 2
            return ((r.square() + t.square()) / 2 * apart + turned).sum((-2, -1))

        return in_wide(of_matrices, w, v)

    def _matrices(self, x: Tensor, dims: Dims) -> Tensor:
        """Return x with the dimensions of its matrices last, where they are by default."""
        chosen = (-2, -1) if dims is None else (dims,) if isinstance(dims, int) else dims
        if x.dim() < 2 or len(chosen) != 2:
            self.check(x.shape if dims is None else tuple(x.shape[d] for d in chosen))
        return x.movedim(chosen, (-2, -1))

    def _with_values(self, x: Tensor, dims: Dims, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x with other singular values."""

        def changed(x: Tensor) -> Tensor:
            left, values, right = _svd(self._matrices(x, dims))
            new = (left * change(values)[..., None, :]) @ right
            return new if dims is None else new.movedim((-2, -1), dims)  # pyright: ignore

        return in_wide(changed, x)


def _newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Return about P Q' of x = P diag(sigma) Q', by steps X <- a X + (b XX' + c (XX')^2) X.

    The coefficients are Muon's (Jordan et al. 2024): they lift small singular values fast and leave
    all of them near 1. Computed in bfloat16 where the processor multiplies matrices of it.
    """
    on_cpu = x.device.type == "cpu"
    fast = not on_cpu or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # pyright: ignore
    y = x.to(torch.bfloat16 if fast and x.dtype != torch.float64 else x.dtype)
    tall = y.shape[-2] > y.shape[-1]
    y = y.mT if tall else y
    y = y / _scale(y)
    size = torch.linalg.matrix_norm(y, keepdim=True)
    y = y / torch.where(size > 0, size, 1.0)
    for _ in range(steps):
        gram = y @ y.mT
        if y.dim() == 2:  # each line one product of matrices and nothing else
            gram = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
            y = torch.addmm(y, gram, y, beta=3.4445)
        else:
            y = 3.4445 * y + (2.0315 * (gram @ gram) - 4.7750 * gram) @ y
    return (y.mT if tall else y).to(x.dtype)


def _scale(x: Tensor) -> Tensor:
    """Return the power of 2 near the largest entry of each matrix, so that nothing overflows."""
    largest = x.detach().abs().amax((-2, -1), keepdim=True) if x.numel() else x.new_ones(())
    usable = (largest > 0) & (largest < math.inf)
    return torch.where(usable, torch.exp2(largest.log2().floor()), torch.ones_like(largest))


def _values(x: Tensor) -> Tensor:
    scale = _scale(x)
    return _cleaned(torch.linalg.svdvals(x / scale), x) * scale[..., 0]


def _svd(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return P, sigma and Q' of x = P diag(sigma) Q'."""
    scale = _scale(x)
    left, values, right = torch.linalg.svd(x / scale, full_matrices=False)
    return left, _cleaned(values, x) * scale[..., 0], right


def _cleaned(values: Tensor, x: Tensor) -> Tensor:
    """Return singular values with 0 for what rounding alone may have made."""
    noise = max(x.shape[-2:]) * torch.finfo(x.dtype).eps
    largest = values.detach().amax(-1, keepdim=True) if values.numel() else values
    return torch.where(values <= noise * largest, torch.zeros_like(values), values)


def _square(x: Tensor) -> Tensor:
    rows, columns = x.shape[-2:]
    size = max(rows, columns)
    return torch.nn.functional.pad(x, (0, size - columns, 0, size - rows))
