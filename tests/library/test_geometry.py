"""Laws that hold for every norm and every potential, on a list that no class escapes."""

from __future__ import annotations

import importlib
import math
import pkgutil
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import mirrorhead as mh
import mirrorhead.geometry as geometry
from mirrorhead.geometry import Norm, Potential, Separable, as_norm, as_potential
from mirrorhead.geometry._choice import describe
from rules_for_tests import few

INF = math.inf
SHAPE = (4, 3)
CENTRE = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(SHAPE)
NORMS: list[Norm] = [
    *(mh.PNorm(p) for p in (1, 1.1, 1.5, 2, 3, INF)),
    *(mh.Schatten(p) for p in (1, 1.5, 2, 3, INF)),
    *(mh.Grouped(p, dim=dim) for p in (1, 1.5, 2, 3, INF) for dim in (0, 1)),
    mh.Grouped(1.5, dim=0, size=2),
    *(mh.KSupport(k=k) for k in (1, 2, 5, 12)),
    mh.KSupport(0.25),
    mh.KSupport(k=2, group=3),
]
POTENTIALS: list[Potential] = [
    *(mh.PNorm(p) for p in (1.1, 1.5, 2, 3)),
    *(mh.Schatten(p) for p in (1.2, 1.5, 2, 3)),
    *(mh.Grouped(p, dim=dim) for p in (1.2, 2, 3) for dim in (0, 1)),
    mh.KSupport(k=5),
    mh.KSupport(k=1, group=3),
    mh.Knee(mh.PNorm(1.1), at=0.7),
    mh.Knee(mh.PNorm(3), at=0.7),
    mh.Centered(mh.PNorm(1.5), at=CENTRE, reach=9.0),
    mh.SoftThreshold(0.4),
    mh.HyperbolicEntropy(0.3),
]
#: Not strictly convex or not smooth: mirror is one subgradient of many.
CORNERS = (mh.KSupport, mh.SoftThreshold)

matrices = hnp.arrays("float64", SHAPE, elements=st.floats(-3, 3).map(lambda x: round(x, 3))).map(
    torch.from_numpy
)


def test_no_class_is_left_out() -> None:
    modules = pkgutil.iter_modules(geometry.__path__, "mirrorhead.geometry.")
    found = {
        value
        for module in modules
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, type) and issubclass(value, (Norm, Potential))
    } - {Norm, Potential, Separable}
    assert {type(norm) for norm in NORMS} == {one for one in found if issubclass(one, Norm)}
    assert {type(psi) for psi in POTENTIALS} == {one for one in found if issubclass(one, Potential)}
    assert found <= {getattr(mh, one.__name__) for one in found}


@pytest.mark.parametrize("norm", NORMS, ids=repr)
@few(25)
@given(u=matrices, w=matrices, scale=st.sampled_from([1e-200, 1e-3, 1.0, 1e200]))
def test_steepest_attains_the_dual_norm(norm: Norm, u: Tensor, w: Tensor, scale: float) -> None:
    direction = norm.steepest(scale * u)
    size = norm.dual_norm(scale * u)
    if not u.any():
        assert not direction.any() and size == 0
        return
    torch.testing.assert_close(norm.norm(direction), torch.ones(()).double(), rtol=1e-8, atol=0)
    gain = (u * direction).sum() * scale
    torch.testing.assert_close(gain, size, rtol=1e-8, atol=0)
    # No other direction gains more: Hölder's inequality.
    assert (u * w).sum().abs() * scale <= size * norm.norm(w) * (1 + 1e-9)


@pytest.mark.parametrize("norm", NORMS, ids=repr)
@few(25)
@given(w=matrices, v=matrices, scale=st.sampled_from([-1e200, -2.0, 1e-200]))
def test_a_norm_is_a_norm(norm: Norm, w: Tensor, v: Tensor, scale: float) -> None:
    for of in (norm.norm, norm.dual_norm):
        assert (of(w) == 0) == (not w.any())
        torch.testing.assert_close(of(scale * w), abs(scale) * of(w), rtol=1e-8, atol=0)
        assert of(w + v) <= (of(w) + of(v)) * (1 + 1e-9)


@pytest.mark.parametrize("norm", [n for n in NORMS if not isinstance(n, mh.KSupport)], ids=repr)
@given(w=matrices)
@few(10)
def test_the_dual_is_a_norm_of_its_own(norm: Norm, w: Tensor) -> None:
    torch.testing.assert_close(norm.dual.norm(w), norm.dual_norm(w))
    torch.testing.assert_close(norm.dual.dual_norm(w), norm.norm(w))


@pytest.mark.parametrize("psi", POTENTIALS, ids=repr)
@few(40)
@given(w=matrices)
def test_inverse_undoes_mirror(psi: Potential, w: Tensor) -> None:
    if isinstance(psi, mh.KSupport):
        w = psi.inverse(w)  # weights that it can have
    torch.testing.assert_close(psi.inverse(psi.mirror(w)), w, rtol=1e-6, atol=2e-7)
    u = psi.mirror(w)
    torch.testing.assert_close(psi.mirror(psi.inverse(u)), u, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("psi", [p for p in POTENTIALS if not isinstance(p, CORNERS)], ids=repr)
@few(25)
@given(w=matrices)
def test_mirror_is_the_gradient_of_the_value(psi: Potential, w: Tensor) -> None:
    x = (w + 0.1 * torch.eye(*SHAPE)).requires_grad_()
    (gradient,) = torch.autograd.grad(psi.value(x), x)
    where = gradient.isfinite()  # singular values that are equal have no derivative in torch
    torch.testing.assert_close(gradient[where], psi.mirror(x.detach())[where], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("psi", POTENTIALS, ids=repr)
@few(40)
@given(w=matrices, v=matrices)
def test_fenchel_young_and_the_divergence(psi: Potential, w: Tensor, v: Tensor) -> None:
    """psi(w) >= psi(v) + <mirror(v), w - v>, and the divergence is the difference."""
    plain = Potential.divergence(psi, w, v)
    gap = psi.value(w) - psi.value(v) - (psi.mirror(v) * (w - v)).sum()
    size = 1 + psi.value(w) + psi.value(v)
    assert gap >= -1e-9 * size
    found = psi.divergence(w, v)
    assert found >= 0
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=float(1e-8 * size))
    assert psi.divergence(w, w) <= 1e-12 * size


def exact_divergence(psi: Any, a: float, b: float) -> Any:
    """The divergence of two numbers with 60 digits, by the definition of each potential."""
    with mpmath.workdps(60):
        x, y = mpmath.mpf(a), mpmath.mpf(b)
        value, slope = EXACT[type(psi)]
        return value(psi, x) - value(psi, y) - slope(psi, y) * (x - y)


def _power(p: Any, x: Any) -> Any:
    return abs(x) ** mpmath.mpf(p) / mpmath.mpf(p)


def _slope(p: Any, x: Any) -> Any:
    return mpmath.sign(x) * abs(x) ** (mpmath.mpf(p) - 1)


def _knee_value(psi: Any, x: Any) -> Any:
    p, k = mpmath.mpf(psi.potential.p), mpmath.mpf(psi.at)
    e = max(abs(x) - k, mpmath.mpf(0))
    return _power(p, min(abs(x), k)) + e * k ** (p - 1) + e**2 * (p - 1) * k ** (p - 2) / 2


def _knee_slope(psi: Any, x: Any) -> Any:
    p, k = mpmath.mpf(psi.potential.p), mpmath.mpf(psi.at)
    e = max(abs(x) - k, mpmath.mpf(0))
    return mpmath.sign(x) * (min(abs(x), k) ** (p - 1) + e * (p - 1) * k ** (p - 2))


EXACT: dict[type, Any] = {
    mh.PNorm: (lambda s, x: _power(s.p, x), lambda s, x: _slope(s.p, x)),
    mh.Schatten: (lambda s, x: _power(s.p, x), lambda s, x: _slope(s.p, x)),
    mh.Grouped: (lambda s, x: _power(s.p, x), lambda s, x: _slope(s.p, x)),
    mh.Knee: (_knee_value, _knee_slope),
    mh.SoftThreshold: (
        lambda s, x: x**2 / 2 + mpmath.mpf(s.threshold) * abs(x),
        lambda s, x: x + mpmath.mpf(s.threshold) * mpmath.sign(x),
    ),
    mh.HyperbolicEntropy: (
        lambda s, x: (
            x * mpmath.asinh(x / mpmath.mpf(s.beta)) - mpmath.sqrt(x**2 + mpmath.mpf(s.beta) ** 2)
        ),
        lambda s, x: mpmath.asinh(x / mpmath.mpf(s.beta)),
    ),
}


@pytest.mark.parametrize("psi", [p for p in POTENTIALS if type(p) in EXACT], ids=repr)
@few(40)
@given(
    b=st.floats(-3, 3).filter(lambda x: abs(x) > 1e-3),
    distance=st.floats(-14, 0.5).map(lambda e: 10**e),
    sign=st.sampled_from([-1, 1]),
)
def test_divergences_keep_their_digits(
    psi: Potential, b: float, distance: float, sign: int
) -> None:
    """Matrices of one entry, against 60 digits."""
    a = b * (1 + sign * distance)
    one, two = (torch.tensor([[x]], dtype=torch.float64) for x in (a, b))
    got = psi.divergence(one, two)
    exact = exact_divergence(psi, a, b)
    assert abs(float(got) - exact) <= 1e-9 * abs(exact)


@pytest.mark.parametrize("psi", [mh.Schatten(1.2), mh.Schatten(3), mh.Grouped(1.2)], ids=repr)
def test_divergences_of_matrices_1e_9_apart(psi: Any) -> None:
    """Rotated singular vectors and groups add their own part, in which nothing cancels."""
    torch.manual_seed(1)
    w = torch.randn(4, 3, dtype=torch.float64)
    step = torch.randn(4, 3, dtype=torch.float64)
    near, far = (float(psi.divergence(w + t * step, w)) for t in (1e-9, 1e-5))
    assert near / far == pytest.approx(1e-8, rel=1e-3)


def wide(w: Tensor) -> list[list[Any]]:
    return [[mpmath.mpf(float(x)) for x in row] for row in w]


def test_schatten_against_60_digits() -> None:
    psi, w = mh.Schatten(1.3), torch.randn(3, 3, dtype=torch.float64)
    with mpmath.workdps(60):
        left, values, right = mpmath.svd_r(mpmath.matrix(wide(w)))
        powers = mpmath.diag([x ** mpmath.mpf("0.3") for x in values])
        expected = left * powers * right
        norm = sum(x ** mpmath.mpf("1.3") for x in values) ** (1 / mpmath.mpf("1.3"))
    found = psi.mirror(w)
    for i in range(3):
        for j in range(3):
            assert float(found[i, j]) == pytest.approx(float(expected[i, j]), abs=1e-12)
    assert float(psi.norm(w)) == pytest.approx(float(norm), rel=1e-13)


def test_known_norms() -> None:
    w = torch.randn(4, 3, dtype=torch.float64)
    for norm, known in (
        (mh.Schatten(1), torch.linalg.matrix_norm(w, "nuc")),
        (mh.Schatten(2), w.norm()),
        (mh.Schatten(INF), torch.linalg.matrix_norm(w, 2)),
        (mh.Grouped(1, dim=0), w.norm(dim=1).sum()),
        (mh.Grouped(1, dim=1), w.norm(dim=0).sum()),
        (mh.Grouped(INF, dim=0), w.norm(dim=1).max()),
        (mh.Grouped(2, dim=0), w.norm()),
        (mh.Grouped(1, dim=0, size=2), w.reshape(2, -1).norm(dim=1).sum()),
        (mh.KSupport(k=1), w.abs().sum()),
        (mh.KSupport(k=12), w.norm()),
        (mh.PNorm(1), w.abs().sum()),
        (mh.PNorm(INF), w.abs().max()),
    ):
        torch.testing.assert_close(norm.norm(w), known)
    left, _, right = torch.linalg.svd(w, full_matrices=False)
    torch.testing.assert_close(mh.Schatten(INF).steepest(w), left @ right)


@given(u=matrices, k=st.integers(1, 12))
@few(50)
def test_the_k_support_norm_is_that_of_its_unit_ball(u: Tensor, k: int) -> None:
    """||w|| is the largest <u, w> over dual norm 1: the mirror image of w attains it."""
    norm = mh.KSupport(k=k)
    w = u.clone()
    image = norm.mirror(w)
    torch.testing.assert_close((image * w).sum(), norm.norm(w) ** 2, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(norm.dual_norm(image), norm.norm(w), rtol=1e-9, atol=1e-12)
    assert int((norm.inverse(u) != 0).sum()) <= k


EACH = [*NORMS, *(p for p in POTENTIALS if not isinstance(p, Norm | mh.Centered))]


@pytest.mark.parametrize("one", EACH, ids=repr)
def test_leading_dimensions_are_a_batch(one: Any) -> None:
    many = torch.randn(5, 2, *SHAPE, dtype=torch.float64)
    flat = many.flatten(0, 1)
    dims = (-2, -1)
    names = ["norm", "dual_norm"] if isinstance(one, Norm) else []
    names += ["value"] if isinstance(one, Potential) and one in POTENTIALS else []
    for name in names:
        expected = torch.stack([getattr(one, name)(x) for x in flat]).reshape(5, 2)
        torch.testing.assert_close(getattr(one, name)(many, dims), expected)
    names = ["steepest"] if isinstance(one, Norm) else []
    names += ["mirror", "inverse"] if one in POTENTIALS else []
    for name in names:
        expected = torch.stack([getattr(one, name)(x) for x in flat]).reshape(many.shape)
        torch.testing.assert_close(one.of_each(name, many, dims), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("one", [*NORMS, *POTENTIALS], ids=repr)
def test_every_dtype_is_kept(one: Any, dtype: torch.dtype) -> None:
    w = torch.randn(SHAPE).to(dtype)
    names = ["norm", "dual_norm", "steepest"] if isinstance(one, Norm) else ["value", "mirror"]
    for name in names:
        found = getattr(one, name)(w)
        assert found.dtype == dtype
        exact = getattr(one, name)(w.double())
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    with pytest.raises(TypeError, match=r"floating point.*int64"):
        getattr(one, names[0])(torch.ones(SHAPE, dtype=torch.int64))


class Cosh(mh.Potential):
    """A potential of one's own, which knows nothing of batches."""

    limit = mh.PNorm(INF)

    def mirror(self, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert w.dim() == 2
        return w.sinh()

    def inverse(self, u: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return u.asinh()

    def value(self, w: Tensor, dims: Any = None) -> Tensor:
        entries = w.cosh() - 1
        return entries.sum() if dims is None else entries.sum(dims)


def test_a_potential_of_ones_own_needs_four_lines() -> None:
    psi, many = Cosh(), torch.randn(6, *SHAPE, dtype=torch.float64)
    torch.testing.assert_close(psi.of_each("mirror", many, (-2, -1)), many.sinh())
    assert psi.divergence(many[0], many[1]) > 0
    assert psi.direction_divergence(many[0], 2 * many[0]) == 0
    with pytest.raises(ValueError, match="v has a zero, infinite or NaN slice"):
        psi.direction_divergence(many[0], 0 * many[0])


def test_bad_geometries_are_refused_by_name() -> None:
    vector = torch.ones(3)
    with pytest.raises(ValueError, match=r"w must be a matrix for Schatten\(1.5\), got shape"):
        mh.Schatten(1.5).mirror(vector)
    with pytest.raises(ValueError, match=r"w has no dimension 1 for Grouped\(1, dim=1\)"):
        mh.Grouped(1, dim=1).norm(vector)
    with pytest.raises(ValueError, match="no multiple of the size 2"):
        mh.Grouped(1, size=2).norm(vector)
    with pytest.raises(ValueError, match=r"PNorm\(1\) is a norm, not a potential"):
        mh.PNorm(1).mirror(vector)
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got 2"):
        mh.KSupport(2)
    with pytest.raises(TypeError, match="either share or k"):
        mh.KSupport()
    with pytest.raises(TypeError, match="acts entry by entry"):
        mh.Knee(mh.Schatten(1.5), at=1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="shape"):
        mh.Centered(mh.PNorm(1.5), at=CENTRE, reach=1.0).check((3,))
    for bad in (0.5, -1, math.nan):
        with pytest.raises(ValueError, match="must be a number from 1 to inf"):
            mh.Schatten(bad)


def test_a_plain_number_stands_for_a_p_norm() -> None:
    assert as_norm(1) == mh.PNorm(1) and as_potential(1.5) == mh.PNorm(1.5)
    assert as_norm(mh.Schatten(1)) == mh.Schatten(1)
    with pytest.raises(TypeError, match="a number from 1 to inf or a Norm, got 'abc'"):
        as_norm("abc")
    with pytest.raises(TypeError, match=r"limit of SoftThreshold\(1\) is PNorm\(2\): give that"):
        as_norm(mh.SoftThreshold(1.0))
    with pytest.raises(ValueError, match=r"p must be finite and greater than 1, got 1"):
        as_potential(1, "p")
    with pytest.raises(ValueError, match=r"Schatten\(1\) is only a norm"):
        as_potential(mh.Schatten(1))


def test_files_know_a_geometry_by_every_entry_of_its_tensors():
    class Weighted(mh.Norm):
        def __init__(self, s):
            self.s = s

        def norm(self, w, dims=None):
            return torch.linalg.vector_norm(self.s * w, dim=dims)

        def dual_norm(self, u, dims=None):
            return torch.linalg.vector_norm(u / self.s, dim=dims)

        def steepest(self, u, dims=None):
            return u / self.s**2 / self.dual_norm(u)

    one, other = torch.ones(2000), torch.ones(2000)
    other[1000] = 2  # which no print of the tensor shows
    assert describe(Weighted(one)) == describe(Weighted(one.clone())) != describe(Weighted(other))
    around = [mh.Centered(mh.PNorm(1.5), at, reach=1.0) for at in (one, other)]
    assert describe(around[0]) != describe(around[1])


def test_a_potential_of_ones_own_may_have_an_attribute_p():
    psi = Cosh()
    psi.p = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert as_potential(psi) is psi


def test_a_potential_without_a_limit_is_told_to_set_one():
    with pytest.raises(AttributeError, match="Bare has no limit: set it to the norm"):
        _ = type(
            "Bare", (mh.Potential,), dict.fromkeys(("mirror", "inverse", "value"), abs)
        )().limit
