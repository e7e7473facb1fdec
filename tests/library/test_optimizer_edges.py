"""What is rare in a run and must not change it: subnormal numbers, where memory begins, how lr is
edited, inference mode, gradients that the caller still needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from building import build
from mirrorhead import MirrorAdam, MirrorDescent, native
from mirrorhead.optim import _sharded
from mirrorhead.optim._sharded import root_mean_squares
from test_native_step import power

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "native": {},  # the default
}
each_implementation = pytest.mark.parametrize(
    "how", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys()
)
each_optimizer = pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])
needs_c = pytest.mark.skipif(not native.available(), reason="the C library was not built")


def run(
    cls: Any, start: Tensor, gradients: list[Tensor], **options: Any
) -> tuple[Any, nn.Parameter]:
    param = nn.Parameter(start.clone())
    optimizer = build(cls, [param], **options)
    for g in gradients:
        param.grad = g.clone()
        optimizer.step()
    return optimizer, param


# Subnormal numbers


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


@each_implementation
@each_optimizer
@pytest.mark.parametrize("p", [1.1, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("center", [None, "init"])
def test_subnormals_of_float16_survive_a_flush_of_those_of_float32(
    how: dict[str, Any], cls: Any, p: float, center: str | None, flush_denormal: None
) -> None:
    """They are normal numbers of float32, in which the step computes."""
    start = (torch.arange(-1023, 1024) * 2.0**-24).half()
    options = {"geometry": p, "center": center, **how}
    gradient = start.roll(7)
    ends = []
    for flushed in (True, False):
        torch.set_flush_denormal(flushed)
        for lr, g in ((1e-3, torch.zeros_like(start)), (10.0, gradient)):
            optimizer, param = run(cls, start, [g] * 2, lr=lr, **options)
            if not g.any():
                assert torch.equal(param.view(torch.int16), start.view(torch.int16))
            ends.append([param.detach(), *optimizer.state[param].values()])
    for flushed, kept in zip(ends[:2], ends[2:], strict=True):
        for a, b in zip(flushed, kept, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-35)


@needs_c
@pytest.mark.parametrize("exponent", [0.1, 0.37, 1 / 1.7, 0.9])
def test_roots_of_subnormal_numbers(exponent: float) -> None:
    bits = np.unique(np.geomspace(1, 2**23 - 1, 500).astype(np.int32))
    x = bits.view(np.float32)
    with mpmath.workdps(30):
        exact = [mpmath.mpf(float(a)) ** mpmath.mpf(exponent) for a in x]
        for result in (power(x, exponent),):
            kept = [k for k, b in enumerate(exact) if b > 2**-126]
            errors = [abs(mpmath.mpf(float(result[k])) / exact[k] - 1) for k in kept]
            # y = e log2(x) is up to 149 e
            assert max(errors) <= (4 + 151 * exponent) * 2**-23
    assert power(np.zeros(3, np.float32), exponent).tolist() == [0, 0, 0]


@each_implementation
@each_optimizer
@pytest.mark.parametrize("p", [1.1, 1.3, 1.37, 1.5, 1.75])
@pytest.mark.parametrize("keep_dual", [True, False])
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 1e-39), (torch.bfloat16, 1e-39), (torch.float64, 1e-310)]
)
def test_a_subnormal_weight_has_the_u_that_belongs_to_it(
    how: dict[str, Any], cls: Any, p: float, keep_dual: bool, dtype: torch.dtype, size: float
) -> None:
    """At p = 1.1, u of 1e-39 is 1.3e-4: far more than a step of 1e-9."""
    start = torch.tensor([size, -size] * 10, dtype=dtype)
    gradient = torch.full_like(start, 1e-9 if cls is MirrorDescent else 1.0)
    lr = 1.0 if cls is MirrorDescent else 1e-9
    knee = {} if cls is MirrorDescent else {"rms_floor": 1.0}
    options = {"lr": lr, "geometry": p, "keep_dual": keep_dual, **knee}
    optimizer, param = run(cls, start, [gradient] * 2, **options, **how)
    _, expected = run(cls, start, [gradient] * 2, foreach=False, **options)
    torch.testing.assert_close(param, expected, rtol=3e-2, atol=torch.finfo(dtype).tiny)
    if p == 1.1 and keep_dual and dtype != torch.float64:  # the step is too small to change a sign
        assert (param * start.sign() >= 0).all()
        assert not param[start > 0].signbit().any()
    if keep_dual:
        u = optimizer.state[param]["dual"].double()
        exact = start.double().sign() * start.double().abs() ** (p - 1)
        step = 2e-9 * (1 if cls is MirrorDescent else p - 1)
        torch.testing.assert_close(u, exact - step, rtol=1e-5, atol=1e-11)


@each_implementation
def test_a_subnormal_step_from_0_moves_a_weight_for_p_above_2(how: dict[str, Any]) -> None:
    """w = |1e-39|^(1/1.7) = 1e-23."""
    _, param = run(MirrorDescent, torch.zeros(40), [torch.ones(40)], lr=1e-39, geometry=2.7, **how)
    torch.testing.assert_close(
        param.detach(), torch.full((40,), -(1e-39 ** (1 / 1.7))), rtol=1e-4, atol=0
    )


# The size r of a tensor


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_r_depends_on_the_weights_alone(
    dtype: torch.dtype, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on threads, or where memory begins, or how it is laid out: else runs differ."""
    if not in_c:
        monkeypatch.setattr(_sharded, "serves", lambda _: False)
    elif not native.available():
        pytest.skip("the C library was not built")
    x = torch.randn(300, 333, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = float(x.double().square().mean().sqrt())
    found = set()
    before = torch.get_num_threads()
    try:
        for threads, offset in product((1, 2), range(9)):
            torch.set_num_threads(threads)
            memory = torch.empty(x.numel() + 16, dtype=dtype)
            moved = memory[offset : offset + x.numel()].view_as(x).copy_(x)
            found |= set(root_mean_squares([moved, x.t().contiguous().t()]))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert found.pop() == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("n", [0, 1, 31, 32, 511, 512, 513, 1025])
def test_r_of_every_length(n: int) -> None:
    x = torch.randn(n) * 1e25
    exact = float(x.double().square().mean().sqrt()) if n else 0.0
    assert root_mean_squares([x])[0] == pytest.approx(exact, rel=1e-14)
    assert math.isnan(root_mean_squares([torch.cat([x, torch.tensor([math.nan])])])[0])


# lr as a tensor


@each_implementation
@each_optimizer
@pytest.mark.parametrize("p", [1.5, 2.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_tensor_lr_edited_in_place_is_checked(
    how: dict[str, Any], cls: Any, p: float, bad: float
) -> None:
    lr = torch.tensor(0.1)
    optimizer, param = run(cls, torch.ones(4), [torch.ones(4)] * 2, lr=lr, geometry=p, **how)
    before, state = param.detach().clone(), str(optimizer.state_dict())
    for edited in (lr, lr.data, lr.numpy()):
        edited[()] = bad
        with pytest.raises(
            ValueError, match=rf"group 0: lr must be at least 0 and finite, got {bad}"
        ):
            optimizer.step()
        assert torch.equal(param, before)
        assert str(optimizer.state_dict()).replace(str(lr), "") == state.replace(
            "tensor(0.1000)", ""
        )
        edited[()] = 0.1
    optimizer.step()
    assert not torch.equal(param, before)


@each_implementation
@each_optimizer
def test_a_tensor_lr_edited_in_place_is_used(how: dict[str, Any], cls: Any) -> None:
    ends = []
    for tensor in (True, False):
        param = nn.Parameter(torch.ones(4))
        optimizer = cls(
            [param], lr=torch.tensor(0.5, dtype=torch.float64) if tensor else 0.5, **how
        )
        for k in range(5):
            group = optimizer.param_groups[0]
            if tensor:
                group["lr"].fill_(0.5**k)
            else:
                group["lr"] = 0.5**k
            param.grad = torch.ones(4)
            optimizer.step()
        ends.append(param)
    assert torch.equal(*ends)


# Inference mode


@each_implementation
@each_optimizer
@pytest.mark.parametrize(
    "options",
    [
        {"geometry": 1.5},
        {"geometry": 2.0},
        {"geometry": 3.0},
        {"geometry": 1.1, "center": "init"},
        {"geometry": 1.1, "keep_dual": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("built_inside", [False, True])
def test_steps_inside_and_outside_of_inference_mode_follow_each_other(
    how: dict[str, Any], cls: Any, options: dict[str, Any], built_inside: bool
) -> None:
    ends = []
    for modes in ((False,) * 4, (True, False, True, False), (False, True, True, False)):
        with torch.inference_mode(built_inside):
            param = nn.Parameter(torch.linspace(-1, 1, 7))
            optimizer = build(cls, [param], lr=0.1, **options, **how)
        for k, mode in enumerate(modes):
            with torch.inference_mode(mode):
                param.grad = torch.linspace(-1, 2, 7) ** k
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
        ends.append(param.detach())
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


# Gradients


@each_implementation
@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_a_step_leaves_gradients_as_they_are(
    how: dict[str, Any], cls: Any, dtype: torch.dtype, p: float
) -> None:
    """Also where a gradient is laid out in another way than its weight."""
    own: list[dict[str, Any]] = [{}]
    if cls is MirrorDescent:
        own += [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}]
        own += [{"momentum": 0.9, "nesterov": True, "normalize": "tensor"}]
    for options, maximize, decay, bad in product(own, (False, True), (0, 0.1), (False, True)):
        params = [nn.Parameter(torch.randn(4, 3).to(dtype)) for _ in range(2)]
        optimizer = cls(
            params, lr=0.1, geometry=p, weight_decay=decay, maximize=maximize, error_if_nonfinite=False,  # noqa: E501
            **options, **how,
        )  # fmt: skip
        for _ in range(2):
            params[0].grad = torch.randn(3, 4).to(dtype).t()
            params[1].grad = torch.randn(4, 3).to(dtype)
            if bad:
                params[0].grad[1, 1] = torch.nan
            before = [param.grad.clone() for param in params if param.grad is not None]
            optimizer.step()
            for param, g in zip(params, before, strict=True):
                assert torch.equal(param.grad.nan_to_num(), g.nan_to_num())  # pyright: ignore
