"""PNorm against its algebra, against mpmath, and against autograd."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirrorhead import PNorm
from mirrorhead.geometry._powers import inverse_exponent, power, signed_power, snap

EXPONENTS = [1.01, 1.1, 1.5, 1.75, 2, 2.7, 3, 10, 100]
p_values = st.sampled_from(EXPONENTS) | st.floats(1.01, 100)
entries = st.floats(-1e3, 1e3).filter(lambda x: x == 0 or abs(x) > 1e-3)
vectors = st.lists(entries, min_size=1, max_size=8).map(
    lambda x: torch.tensor(x, dtype=torch.float64)
)


@given(p_values, vectors)
def test_inverse_undoes_mirror(p: float, w: torch.Tensor) -> None:
    psi = PNorm(p)
    u = psi.mirror(w)
    # p = 100 takes 1e3 to 1e297 and back; nothing here overflows.
    torch.testing.assert_close(psi.inverse(u), w, rtol=1e-12, atol=0)


@given(p_values, vectors)
def test_dual_norm_of_mirror(p: float, w: torch.Tensor) -> None:
    psi = PNorm(p)
    expected = psi.norm(w) ** (p - 1)
    torch.testing.assert_close(psi.dual_norm(psi.mirror(w)), expected, rtol=1e-11, atol=0)


@given(p_values, vectors, vectors)
def test_hoelder(p: float, a: torch.Tensor, b: torch.Tensor) -> None:
    n = min(len(a), len(b))
    a, b = a[:n], b[:n]
    assert abs(a @ b) <= PNorm(p).norm(a) * PNorm(p).dual_norm(b) * (1 + 1e-12)


@given(p_values, vectors, st.floats(1e-300, 1e280))
def test_norm_is_homogeneous(p: float, w: torch.Tensor, scale: float) -> None:
    psi = PNorm(p)
    torch.testing.assert_close(psi.norm(w * scale), psi.norm(w) * scale, rtol=1e-9, atol=1e-315)


def test_norms_do_not_overflow() -> None:
    huge = torch.full((4,), 1e200, dtype=torch.float64)
    assert PNorm(3).norm(huge) == pytest.approx(4 ** (1 / 3) * 1e200)
    assert PNorm(3).norm(huge * 1e-300 * 1e-50) == pytest.approx(4 ** (1 / 3) * 1e-150)
    assert PNorm(100).norm(torch.full((2,), 1e-30)) == pytest.approx(2**0.01 * 1e-30)
    assert PNorm(2).norm(torch.zeros(3)) == 0
    assert PNorm(2).norm(torch.zeros(0)) == 0


def exact_divergence(a: float, b: float, p: float) -> Any:
    with mpmath.workdps(60):
        x, y, e = mpmath.mpf(a), mpmath.mpf(b), mpmath.mpf(p)
        slope = mpmath.sign(y) * abs(y) ** (e - 1)
        return (abs(x) ** e - abs(y) ** e) / e - slope * (x - y)


@given(
    p_values,
    st.floats(-2, 2).filter(lambda x: abs(x) > 1e-3),
    st.floats(-15, 1).map(lambda e: 10**e),
    st.sampled_from([-1, 1]),
)
def test_divergence_has_all_its_digits(p: float, b: float, distance: float, sign: int) -> None:
    a = b * (1 + sign * distance)
    got = PNorm(p).divergence(
        torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
    )
    exact = exact_divergence(a, b, p)
    assert got >= 0
    assert abs(float(got) - exact) <= 1e-11 * abs(exact)


@pytest.mark.parametrize("p", EXPONENTS)
def test_divergence_of_directions_1e_12_apart(p: float) -> None:
    w = torch.randn(50, dtype=torch.float64)
    v = w * (1 + 1e-12 * torch.randn(50, dtype=torch.float64)) * 3
    got = PNorm(p).direction_divergence(w, v)
    with mpmath.workdps(60):
        pairs = []
        for x in (w, v):
            entries = [mpmath.mpf(t) for t in x.tolist()]
            norm = sum(abs(t) ** mpmath.mpf(p) for t in entries) ** (1 / mpmath.mpf(p))
            pairs.append([t / norm for t in entries])
        inner = sum(
            mpmath.sign(y) * abs(y) ** (mpmath.mpf(p) - 1) * x for x, y in zip(*pairs, strict=True)
        )
        exact = 1 - inner
    assert 0 < exact < 1e-21
    # The normalised entries themselves are rounded at 1e-16: four digits are left.
    assert abs(float(got) - exact) <= 2e-3 * exact


@given(p_values, vectors, vectors)
def test_direction_divergence_is_one_minus_inner(
    p: float, w: torch.Tensor, v: torch.Tensor
) -> None:
    n = min(len(w), len(v))
    w, v = w[:n], v[:n]
    psi = PNorm(p)
    if not (w.any() and v.any()):
        with pytest.raises(ValueError, match="no direction"):
            psi.direction_divergence(w, v)
        return
    inner = psi.mirror(v / psi.norm(v)) @ (w / psi.norm(w))
    torch.testing.assert_close(psi.direction_divergence(w, v), 1 - inner, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("p", EXPONENTS)
def test_divergence_where_entries_vanish(p: float) -> None:
    w = torch.tensor([0.0, 1.0, 0.0, 2.0, -1.0], dtype=torch.float64)
    v = torch.tensor([0.0, 0.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    for a, b in zip(w, v, strict=True):
        got = PNorm(p).divergence(a, b)
        torch.testing.assert_close(got.item(), float(exact_divergence(a.item(), b.item(), p)))


@pytest.mark.parametrize("p", [1.1, 1.5, 2, 2.7, 3])
def test_autograd(p: float) -> None:
    psi = PNorm(p)
    w = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck
    assert check(psi.mirror, w)
    assert check(psi.inverse, w)
    assert check(psi.value, w)
    assert check(lambda x: psi.norm(x, dims=-1), w)
    assert check(psi.dual_norm, w)
    assert check(psi.divergence, (w, v))
    assert check(lambda a, b: psi.direction_divergence(a, b, dims=-1), (w, v))
    # The gradient of the potential is the mirror map; that of the divergence, a difference.
    (gradient,) = torch.autograd.grad(psi.value(w), w)
    torch.testing.assert_close(gradient, psi.mirror(w))
    (gradient,) = torch.autograd.grad(psi.divergence(w, v), w)
    torch.testing.assert_close(gradient, psi.mirror(w) - psi.mirror(v), rtol=1e-7, atol=1e-9)


def test_autograd_at_zero() -> None:
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for p in (1.5, 2.0, 3.0):
        for f in (PNorm(p).value, PNorm(p).norm):
            (gradient,) = torch.autograd.grad(f(w), w)
            assert torch.equal(gradient, torch.zeros(3, dtype=torch.float64))
    (slope,) = torch.autograd.grad(PNorm(1.5).mirror(w).sum(), w)
    assert slope.isinf().all()  # the mirror map is vertical there
    (slope,) = torch.autograd.grad(PNorm(3).mirror(w).sum(), w)
    assert not slope.any()


@pytest.mark.parametrize("p", [1.1, 2, 3, 100])
def test_norms_of_infinity_and_nan(p: float) -> None:
    w = torch.tensor([[1, math.inf], [-math.inf, math.inf], [math.inf, math.nan], [3.0, 4.0]])
    for norm in (PNorm(p).norm, PNorm(p).dual_norm):
        assert norm(w, dims=-1)[:2].tolist() == [math.inf, math.inf]
        assert norm(w, dims=-1)[2].isnan()
        assert norm(w, dims=-1)[3] == norm(w[3])
    rows = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(PNorm(p).norm(rows, dims=-1).sum(), rows)
    one = w[3].clone().requires_grad_()
    assert torch.equal(gradient[3], torch.autograd.grad(PNorm(p).norm(one), one)[0])
    assert gradient[0, 0] == 0
    with pytest.raises(ValueError, match="w has a zero, infinite or NaN slice"):
        PNorm(p).direction_divergence(w[0], w[3])


def test_batches_are_slices() -> None:
    psi = PNorm(1.75)
    w, v = torch.randn(4, 3, 5, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    for f in (psi.value, psi.norm, psi.dual_norm):
        torch.testing.assert_close(f(w, dims=(-2, -1)), torch.stack([f(x) for x in w]))
    for f in (psi.divergence, psi.direction_divergence):
        expected = torch.stack([f(x, y) for x, y in zip(w, v, strict=True)])
        torch.testing.assert_close(f(w, v, dims=(1, 2)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    psi, w = PNorm(1.5), torch.randn(100).to(dtype)
    for result in (psi.mirror(w), psi.inverse(w), psi.norm(w), psi.value(w), psi.divergence(w, w)):
        assert result.dtype == dtype
    torch.testing.assert_close(psi.norm(w), psi.norm(w.double()).to(dtype))
    assert psi.divergence(w, w) == 0
    with pytest.raises(TypeError, match=r"floating point.*int64"):
        psi.norm(torch.arange(3))


@pytest.mark.parametrize("p", [0.5, -2, 0, math.nan, -math.inf])
def test_bad_p(p: float) -> None:
    with pytest.raises(ValueError, match=f"p must be a number from 1 to inf, got {p!r}"):
        PNorm(p)


@pytest.mark.parametrize("p", ["2", None, True, torch.tensor(2.0)])
def test_p_of_the_wrong_kind(p: object) -> None:
    with pytest.raises(TypeError, match="p must be a number from 1 to inf"):
        PNorm(p)  # pyright: ignore[reportArgumentType]


@given(st.integers(1, 512).map(lambda q: q / 4) | st.floats(0.01, 100), st.floats(0, 10))
def test_power_is_the_power(exponent: float, a: float) -> None:
    x = torch.tensor([a, -a], dtype=torch.float64)
    expected = x.abs() ** exponent
    torch.testing.assert_close(power(x.abs(), exponent), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(signed_power(x, exponent), expected * x.sign(), rtol=1e-12, atol=0)


def test_exponents_snap_to_quarters() -> None:
    assert inverse_exponent(1.1) == 10
    assert inverse_exponent(1.01) == 100
    assert inverse_exponent(1.4) == 2.5
    assert snap(1 / 3) == 1 / 3
    assert power(torch.ones(1), 12.5) == 1


def test_what_is_no_tensor_is_refused():
    for w in (None, [1.0, 2.0], torch.tensor([1, 2])):
        with pytest.raises(TypeError, match="expected a floating point tensor"):
            PNorm(3).norm(w)  # type: ignore[arg-type]
